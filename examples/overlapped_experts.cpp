// Experts that begin while rows of their layer still arrive.
//
// A low-latency dispatch can count arrivals: for each block of rows of each expert there is a word, and a kernel on
// another stream polls it. So a grouped GEMM of persistent blocks need not wait for the whole call: a tile starts as
// soon as its own rows are there. These pretend experts only multiply; what matters is the loop around them.
//
// With GPUs the experts are a CUDA kernel; it takes few SMs, as the dispatch must run beside it. On the CPU they are a
// thread. The ranks are threads here; examples/intranode.cpp says how processes find each other.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <thread>
#include <vector>

#include "deep_ep/arrivals.hpp"
#include "deep_ep/buffer.hpp"

#if defined(__CUDACC__)
#define EXAMPLE_DEVICE __host__ __device__
#else
#define EXAMPLE_DEVICE
#endif

namespace {

constexpr int kRanks = 2;
constexpr int kMaxTokens = 8;
constexpr int kHidden = 256;
constexpr int kTopk = 2;
constexpr int kLocalExperts = 4;
constexpr int kExperts = kRanks * kLocalExperts;
constexpr int kRows = kRanks * kMaxTokens;  // of an expert, at most
constexpr int kTileRows = 4;                // a GEMM would take 64 or 128
constexpr int kTiles = kRows / kTileRows;   // of an expert, at most
constexpr int kLayers = 3;

EXAMPLE_DEVICE float to_float(std::uint16_t bf16) {
  const std::uint32_t bits = std::uint32_t{bf16} << 16;
  float value = 0;
  memcpy(&value, &bits, sizeof(value));
  return value;
}
EXAMPLE_DEVICE std::uint16_t to_bf16(float value) {  // exact for the small whole numbers used here
  std::uint32_t bits = 0;
  memcpy(&bits, &value, sizeof(bits));
  return static_cast<std::uint16_t>(bits >> 16);
}

/// Expert e of a rank multiplies by e + 1.
struct Experts {
  const std::int64_t* arrivals;    // [kLocalExperts, kTiles]
  std::int64_t calls;              // that were given these words so far; a replayed kernel counts them itself
  const std::uint16_t* recv_x;     // [kLocalExperts, kRows, kHidden]
  const std::int32_t* recv_count;  // [kLocalExperts]
  std::uint16_t* y;                // like recv_x

  /// The word of the tile says that its rows and recv_count can be read; or, negative, that they will never come.
  EXAMPLE_DEVICE bool is_ready(std::int64_t word) const { return word < 0 || word >= calls * deep_ep::kArrivalStep; }

  EXAMPLE_DEVICE void compute(int tile, int thread, int threads) const {
    const int expert = tile / kTiles;
    const int first = tile % kTiles * kTileRows;
    for (int row = first; row < recv_count[expert] && row < first + kTileRows; ++row) {
      const int at = (expert * kRows + row) * kHidden;
      for (int i = at + thread; i < at + kHidden; i += threads) {
        y[i] = to_bf16(to_float(recv_x[i]) * static_cast<float>(expert + 1));
      }
    }
  }
};

#if defined(__CUDACC__)
/// Tiles in a fixed order; whoever knows which experts fill up first goes through those first.
__global__ void run_experts(Experts experts) {
  for (int tile = static_cast<int>(blockIdx.x); tile < kLocalExperts * kTiles; tile += static_cast<int>(gridDim.x)) {
    __shared__ bool there;
    __syncthreads();
    if (threadIdx.x == 0) {
      std::int64_t word = 0;
      do {
        asm volatile("ld.acquire.gpu.s64 %0, [%1];" : "=l"(word) : "l"(experts.arrivals + tile) : "memory");
      } while (!experts.is_ready(word));
      there = word >= 0;
    }
    __syncthreads();  // what thread 0 has acquired, all have. A copy by TMA would need fence.proxy.async.global here
    if (there) experts.compute(tile, static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x));
  }
}
#endif

/// On a stream, or in a thread, of its own.
class Runner {
 public:
  explicit Runner(deep_ep::Executor& executor) : executor_(executor), stream_(executor.create_stream()) {}
  ~Runner() { executor_.destroy_stream(stream_); }
  Runner(const Runner&) = delete;

  void begin(const Experts& experts) {
#if defined(__CUDACC__)
    if (executor_.device().kind == deep_ep::Device::Kind::cuda) {
      run_experts<<<4, 128, 0, static_cast<cudaStream_t>(stream_)>>>(experts);
      return;
    }
#endif
    thread_ = std::thread([experts] {
      for (int tile = 0; tile < kLocalExperts * kTiles; ++tile) {
        std::atomic_ref<std::int64_t> word(const_cast<std::int64_t&>(experts.arrivals[tile]));
        while (!experts.is_ready(word.load(std::memory_order_acquire))) std::this_thread::yield();
        if (word.load(std::memory_order_relaxed) >= 0) experts.compute(tile, 0, 1);
      }
    });
  }

  /// What `stream` does from now on sees the result.
  void end(deep_ep::StreamHandle stream) {
    if (thread_.joinable()) thread_.join();
    executor_.wait_event(stream, executor_.record_event(stream_));
  }

 private:
  deep_ep::Executor& executor_;
  deep_ep::StreamHandle stream_;
  std::thread thread_;
};

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

bool run_rank(int rank, const std::shared_ptr<deep_ep::Bootstrap>& bootstrap) {
  const auto executor =
      deep_ep::cuda_device_count() >= kRanks ? deep_ep::make_cuda_executor(rank) : deep_ep::make_host_executor();
  executor->make_current();
  deep_ep::BufferOptions options;
  options.heap_bytes = std::size_t{16} << 20;
  options.low_latency.bytes = deep_ep::Buffer::low_latency_bytes_hint(kMaxTokens, kHidden, kRanks, kExperts);
  deep_ep::Buffer buffer(bootstrap, executor, options);
  const deep_ep::CallOptions call;

  DeviceMemory memory(*executor);
  std::vector<std::uint16_t> values;
  std::vector<std::int64_t> selected;
  std::vector<float> weights;
  for (int t = 0; t < kMaxTokens; ++t) {
    values.insert(values.end(), kHidden, to_bf16(static_cast<float>(1 + 7 * rank + t % 7)));
    selected.insert(selected.end(), {t % kExperts, (t + 3) % kExperts});
    weights.insert(weights.end(), {0.25F, 0.5F});
  }
  const auto x = memory.upload(deep_ep::DType::bfloat16, values, kHidden);
  const auto topk_idx = memory.upload(deep_ep::DType::int64, selected, kTopk);
  const auto topk_weights = memory.upload(deep_ep::DType::float32, weights, kTopk);
  // Zeros at first. Nobody resets them: each call adds kArrivalStep to every word.
  const auto arrivals = memory.upload(deep_ep::DType::int64, std::vector<std::int64_t>(kLocalExperts * kTiles), kTiles);
  auto y = memory.upload(deep_ep::DType::bfloat16, std::vector<std::uint16_t>(kLocalExperts * kRows * kHidden),
                         std::int64_t{kRows} * kHidden);
  y = deep_ep::TensorView::contiguous(y.data, y.dtype, {kLocalExperts, kRows, kHidden}, y.device);

  Runner runner(*executor);
  bool good = true;
  for (int layer = 1; layer <= kLayers; ++layer) {
    deep_ep::LowLatencyDispatchArguments to_experts;
    to_experts.x = x;
    to_experts.topk_idx = topk_idx;
    to_experts.max_tokens = kMaxTokens;
    to_experts.num_experts = kExperts;
    to_experts.format = deep_ep::LowLatencyFormat::bf16;
    to_experts.arrival_counters = arrivals;
    to_experts.arrival_rows = kTileRows;
    const auto received = buffer.low_latency_dispatch(to_experts, call);

    // No event between them: the words say when each tile may begin. The dispatch comes first, so it has its SMs.
    runner.begin({arrivals.as<std::int64_t>(), layer, received.recv_x.as<std::uint16_t>(),
                  received.recv_count.as<std::int32_t>(), y.as<std::uint16_t>()});
    runner.end(call.stream);

    deep_ep::LowLatencyCombineArguments back;
    back.x = y;
    back.topk_idx = topk_idx;
    back.topk_weights = topk_weights;
    back.handle = &received.handle;
    const auto combined = buffer.low_latency_combine(back, call);
    std::vector<std::uint16_t> result(values.size());
    executor->copy(result.data(), combined.combined_x.data(), result.size() * 2, call.stream);
    executor->synchronize(call.stream);
    for (std::size_t i = 0; i < result.size(); ++i) {
      const auto token = i / kHidden;
      const auto factor = [&](std::size_t k) {
        return weights[2 * token + k] * static_cast<float>(selected[2 * token + k] % kLocalExperts + 1);
      };
      good = good && to_float(result[i]) == to_float(values[i]) * (factor(0) + factor(1));
    }
  }
  std::printf("rank %d: %s\n", rank, good ? "every weighted sum is right" : "WRONG sums");
  buffer.destroy();
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
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return correct[0] != 0 && correct[1] != 0 ? 0 : 1;
}
