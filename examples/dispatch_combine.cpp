// Dispatch and combine with every rank a thread of this program: GPUs where there are enough, else the CPU.
//
//   example_dispatch_combine [ranks]
//
// Each token goes to the ranks of its experts; the "experts" return what they got; so each token comes back multiplied
// by the number of ranks it went to.
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <thread>
#include <vector>

#include "deep_ep/buffer.hpp"

namespace {

using deep_ep::DType;
using deep_ep::TensorView;

constexpr std::int64_t kTokens = 64, kHidden = 256, kTopk = 2;
constexpr int kExpertsPerRank = 4;
constexpr std::uint16_t kOne = 0x3f80;  // 1.0 in bfloat16

/// Copies a vector into memory of the executor.
template <class T>
TensorView upload(deep_ep::Executor& executor, const std::vector<T>& data, DType dtype, std::int64_t columns,
                  deep_ep::StreamHandle stream) {
  void* memory = executor.allocate(data.size() * sizeof(T));
  executor.copy(memory, data.data(), data.size() * sizeof(T), stream);
  executor.synchronize(stream);
  return TensorView::contiguous(memory, dtype, {static_cast<std::int64_t>(data.size()) / columns, columns},
                                executor.device());
}

/// Returns how many values differ from what they must be.
int run_rank(const std::shared_ptr<deep_ep::Bootstrap>& bootstrap, bool on_gpus) {
  const int rank = bootstrap->rank(), ranks = bootstrap->size();
  const auto executor = on_gpus ? deep_ep::make_cuda_executor(rank) : deep_ep::make_host_executor();
  executor->make_current();
  const deep_ep::StreamHandle stream = executor->create_stream();
  const deep_ep::CallOptions call{.stream = stream};
  deep_ep::Buffer buffer(bootstrap, executor, {.heap_bytes = std::size_t{64} << 20});

  // Token t chooses an expert of rank t % ranks and one of the next rank.
  std::vector<std::int64_t> experts;
  for (std::int64_t t = 0; t < kTokens; ++t) {
    experts.push_back(t % ranks * kExpertsPerRank);
    experts.push_back((t + 1) % ranks * kExpertsPerRank + 1);
  }
  const std::vector<std::uint16_t> ones(kTokens * kHidden, kOne);
  const TensorView topk_idx = upload(*executor, experts, DType::int64, kTopk, stream);
  const TensorView x = upload(*executor, ones, DType::bfloat16, kHidden, stream);

  const deep_ep::DispatchLayout layout = buffer.get_dispatch_layout(topk_idx, ranks * kExpertsPerRank, call);
  deep_ep::DispatchArguments arguments{.x = x};
  arguments.use(layout);
  const deep_ep::DispatchResult received = buffer.dispatch(arguments, call);
  const deep_ep::CombineResult result = buffer.combine({.x = received.recv_x.view(), .handle = &received.handle}, call);

  std::vector<std::uint16_t> combined(ones.size());
  executor->copy(combined.data(), result.combined_x.data(), combined.size() * sizeof(combined[0]), stream);
  executor->synchronize(stream);
  const std::uint16_t expected = ranks == 1 ? kOne : 0x4000;  // 2.0
  int wrong = 0;
  for (const std::uint16_t value : combined) wrong += value != expected;
  std::printf("rank %d on %s: sent %lld tokens, received %lld rows, %d wrong values\n", rank,
              to_string(executor->device()).c_str(), static_cast<long long>(kTokens),
              static_cast<long long>(received.recv_x.size(0)), wrong);

  buffer.destroy();
  executor->free(topk_idx.data);
  executor->free(x.data);
  executor->destroy_stream(stream);
  return wrong;
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 4;
  if (ranks < 1) {
    std::fprintf(stderr, "usage: example_dispatch_combine [ranks, at least 1]\n");
    return 2;
  }
  const bool on_gpus = deep_ep::cuda_device_count() >= ranks;
  const auto bootstraps = deep_ep::make_thread_bootstraps(ranks);
  std::vector<int> wrong(bootstraps.size(), 1);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < bootstraps.size(); ++rank) {
    threads.emplace_back([&, rank] {
      try {
        wrong[rank] = run_rank(bootstraps[rank], on_gpus);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %zu: %s\n", rank, error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const int count : wrong) {
    if (count != 0) return 1;
  }
  return 0;
}
