// Decoding with two micro-batches: while the rows of one travel, the other computes.
//
// Low-latency calls never make the host wait. With `return_recv_hook` a call only sends; calling its hook later puts
// the receive part on the stream, and in between no SM is busy with communication. The ranks are threads here, each
// with a GPU of its own where there are two, otherwise on the CPU; examples/intranode.cpp says how processes find each
// other.
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
constexpr int kMaxTokens = 8;  // a rank may have at most so many tokens in a call; all ranks say the same number
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

/// Memory where the executor computes; an engine has its tensors already.
class DeviceMemory {
 public:
  explicit DeviceMemory(deep_ep::Executor& executor) : executor_(executor) {}
  ~DeviceMemory() {
    for (void* memory : memory_) executor_.free(memory);
  }
  DeviceMemory(const DeviceMemory&) = delete;

  template <class T>
  deep_ep::TensorView upload(deep_ep::DType dtype, const std::vector<T>& values, std::int64_t columns) {
    memory_.push_back(executor_.allocate(values.size() * sizeof(T)));
    executor_.copy(memory_.back(), values.data(), values.size() * sizeof(T), nullptr);
    executor_.synchronize(nullptr);
    const auto rows = static_cast<std::int64_t>(values.size()) / columns;
    return deep_ep::TensorView::contiguous(memory_.back(), dtype, {rows, columns}, executor_.device());
  }

 private:
  deep_ep::Executor& executor_;
  std::vector<void*> memory_;
};

/// Some tokens of one rank: the value `first + t` in all channels, experts t % 8 and (t + 3) % 8, weights 1/4 and 1/2.
struct MicroBatch {
  MicroBatch(DeviceMemory& memory, float first, std::int64_t tokens) {
    std::vector<std::int64_t> experts;
    std::vector<float> weights;
    for (std::int64_t t = 0; t < tokens; ++t) {
      values.insert(values.end(), kHidden, to_bf16(first + static_cast<float>(t)));
      experts.insert(experts.end(), {t % kExperts, (t + 3) % kExperts});
      weights.insert(weights.end(), {0.25F, 0.5F});
    }
    x = memory.upload(deep_ep::DType::bfloat16, values, kHidden);
    topk_idx = memory.upload(deep_ep::DType::int64, experts, kTopk);
    topk_weights = memory.upload(deep_ep::DType::float32, weights, kTopk);
  }

  std::vector<std::uint16_t> values;
  deep_ep::TensorView x, topk_idx, topk_weights;
};

bool run_rank(int rank, const std::shared_ptr<deep_ep::Bootstrap>& bootstrap) {
  const auto executor =
      deep_ep::cuda_device_count() >= kRanks ? deep_ep::make_cuda_executor(rank) : deep_ep::make_host_executor();
  executor->make_current();

  // One buffer for the whole run of the program, for low-latency calls of up to these sizes.
  deep_ep::BufferOptions options;
  options.heap_bytes = std::size_t{16} << 20;
  options.low_latency.bytes = deep_ep::Buffer::low_latency_bytes_hint(kMaxTokens, kHidden, kRanks, kExperts);
  deep_ep::Buffer buffer(bootstrap, executor, options);

  deep_ep::CallOptions call;  // the executor's default stream; an engine passes its cudaStream_t

  const auto dispatch = [&](const MicroBatch& batch) {
    deep_ep::LowLatencyDispatchArguments arguments;
    arguments.x = batch.x;
    arguments.topk_idx = batch.topk_idx;
    arguments.max_tokens = kMaxTokens;
    arguments.num_experts = kExperts;
    arguments.return_recv_hook = true;
    arguments.format = deep_ep::LowLatencyFormat::bf16;  // fp8: 8-bit floats with a scale for every 128 channels
    return buffer.low_latency_dispatch(arguments, call);
  };
  // These pretend experts hand back their input: recv_x is [local experts, ranks * max_tokens, hidden], and the first
  // recv_count[e] rows of expert e are there once the hook's work is done.
  const auto combine = [&](const MicroBatch& batch, const deep_ep::LowLatencyDispatchResult& received) {
    deep_ep::LowLatencyCombineArguments arguments;
    arguments.x = received.recv_x.view();
    arguments.topk_idx = batch.topk_idx;
    arguments.topk_weights = batch.topk_weights;
    arguments.handle = &received.handle;
    arguments.return_recv_hook = true;
    return buffer.low_latency_combine(arguments, call);
  };

  DeviceMemory memory(*executor);
  const MicroBatch a(memory, static_cast<float>(16 * rank), kMaxTokens);
  const MicroBatch b(memory, static_cast<float>(16 * rank + 8), kMaxTokens - 3);  // fewer are fine

  const auto received_a = dispatch(a);
  // ... attention of b ...
  received_a.hook();
  const auto received_b = dispatch(b);
  // ... experts of a ...
  received_b.hook();
  const auto combined_a = combine(a, received_a);
  // ... experts of b ...
  combined_a.hook();
  const auto combined_b = combine(b, received_b);
  // ... attention of a's next layer ...
  combined_b.hook();

  const auto correct = [&](const MicroBatch& batch, const deep_ep::Tensor& combined) {
    std::vector<std::uint16_t> result(batch.values.size());
    executor->copy(result.data(), combined.data(), result.size() * 2, call.stream);
    executor->synchronize(call.stream);
    for (std::size_t i = 0; i < result.size(); ++i) {
      if (to_float(result[i]) != to_float(batch.values[i]) * 0.75F) return false;
    }
    return true;
  };
  const bool good = correct(a, combined_a.combined_x) && correct(b, combined_b.combined_x);
  std::printf("rank %d: %s\n", rank, good ? "every weighted sum is right" : "WRONG sums");
  buffer.destroy();  // collective: no rank frees what a peer still writes to
  return good;
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
