// A Mixture-of-Experts layer's communication in its smallest form: two ranks, dispatch, pretend experts, combine.
//
// The ranks are threads here, each with a GPU of its own where there are two, otherwise on the CPU. In an engine with a
// process for every GPU only the bootstrap differs (deep_ep::make_mpi_bootstrap, make_nccl_bootstrap, or your own
// all-gather in make_callback_bootstrap).
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "deep_ep/buffer.hpp"

namespace {

constexpr int kRanks = 2;
constexpr std::int64_t kTokens = 16;  // of each rank
constexpr std::int64_t kHidden = 256;
constexpr std::int64_t kTopk = 2;
constexpr int kExperts = 8;  // experts 0..3 live on rank 0, 4..7 on rank 1

std::uint16_t to_bf16(float value) {  // exact for the small whole numbers used here
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<std::uint16_t>(bits >> 16);
}
float to_float(std::uint16_t bf16) {
  const std::uint32_t bits = std::uint32_t{bf16} << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// An engine has its tensors already; here they are copied to where the executor computes.
template <class T>
deep_ep::TensorView to_device(deep_ep::Executor& executor, deep_ep::DType dtype, const std::vector<T>& values,
                              std::int64_t columns, deep_ep::StreamHandle stream) {
  void* memory = executor.allocate(values.size() * sizeof(T));
  executor.copy(memory, values.data(), values.size() * sizeof(T), stream);
  executor.synchronize(stream);
  return deep_ep::TensorView::contiguous(memory, dtype, {kTokens, columns}, executor.device());
}

bool run_rank(int rank, const std::shared_ptr<deep_ep::Bootstrap>& bootstrap) {
  const auto executor =
      deep_ep::cuda_device_count() >= kRanks ? deep_ep::make_cuda_executor(rank) : deep_ep::make_host_executor();
  executor->make_current();
  const deep_ep::StreamHandle stream = nullptr;  // the executor's default stream; an engine passes its cudaStream_t
  deep_ep::CallOptions call;
  call.stream = stream;

  // One buffer for the whole run of the program. Its constructor meets the other ranks.
  deep_ep::BufferOptions options;
  options.heap_bytes = 2 * deep_ep::Buffer::heap_bytes_hint(kRanks, kTokens, kHidden * 2, kTopk);
  deep_ep::Buffer buffer(bootstrap, executor, options);

  // Token t of rank r has the value r * 16 + t in all its channels and goes to experts t % 8 and (t + 3) % 8.
  std::vector<std::uint16_t> x;
  std::vector<std::int64_t> experts;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    x.insert(x.end(), kHidden, to_bf16(static_cast<float>(rank * kTokens + t)));
    experts.insert(experts.end(), {t % kExperts, (t + 3) % kExperts});
  }
  const auto device_x = to_device(*executor, deep_ep::DType::bfloat16, x, kHidden, stream);
  const auto device_experts = to_device(*executor, deep_ep::DType::int64, experts, kTopk, stream);
  const auto device_weights =
      to_device(*executor, deep_ep::DType::float32, std::vector<float>(experts.size(), 0.5F), kTopk, stream);

  // 1. Which ranks need which token, then send them. Rows arrive in recv_x ordered by source rank and token.
  const deep_ep::DispatchLayout layout = buffer.get_dispatch_layout(device_experts, kExperts, call);
  deep_ep::DispatchArguments dispatch;
  dispatch.x = device_x;
  dispatch.use(layout);
  dispatch.topk_idx = device_experts;
  dispatch.topk_weights = device_weights;
  deep_ep::DispatchResult received = buffer.dispatch(dispatch, call);
  std::printf("rank %d received %lld rows\n", rank, static_cast<long long>(received.handle.num_recv_rows));

  // 2. Here recv_x, recv_topk_idx (-1 = another rank's expert) and recv_topk_weights go through this rank's experts.
  //    These pretend experts hand back their input. Output written over recv_x stays in memory that peers can read, so
  //    combine fetches it from there; output anywhere else works too and is sent to its owners.

  // 3. Every token's rows come home and are added up: one from each rank that had an expert for it.
  deep_ep::CombineArguments combine;
  combine.x = received.recv_x.view();
  combine.handle = &received.handle;
  const deep_ep::CombineResult combined = buffer.combine(combine, call);

  std::vector<std::uint16_t> result(combined.combined_x.view().bytes() / 2);
  executor->copy(result.data(), combined.combined_x.data(), combined.combined_x.view().bytes(), stream);
  executor->synchronize(stream);  // an engine goes on enqueueing instead
  bool correct = true;
  for (std::size_t i = 0; i < result.size(); ++i) {
    const auto t = static_cast<std::int64_t>(i) / kHidden;
    const bool on_both_ranks = (t % kExperts) / 4 != ((t + 3) % kExperts) / 4;
    correct = correct && to_float(result[i]) == to_float(x[i]) * (on_both_ranks ? 2.0F : 1.0F);
  }
  std::printf("rank %d: %s\n", rank, correct ? "every sum is right" : "WRONG sums");

  buffer.destroy();  // collective: no rank frees what a peer still reads
  for (const auto& tensor : {device_x, device_experts, device_weights}) executor->free(tensor.data);
  return correct;
}

}  // namespace

int main() {
  const auto bootstraps = deep_ep::make_thread_bootstraps(kRanks);
  std::vector<int> correct(kRanks, 0);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto at = static_cast<std::size_t>(rank);
      try {
        correct[at] = run_rank(rank, bootstraps[at]) ? 1 : 0;
      } catch (const std::exception& error) {  // everything the library throws derives from deep_ep::Error
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return correct[0] != 0 && correct[1] != 0 ? 0 : 1;
}
