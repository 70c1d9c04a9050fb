// The loop of a decode engine: a step is recorded once and launched for every token that is made; host and GPU work on
// two steps at a time.
//
// A step is several layers. In each, the tokens are two micro-batches: while the rows of one travel, the other
// computes. Everything a step reads and writes is there twice. While the GPU runs a step with one half, the host reads
// what the step before has left in the other, and writes the inputs of the next. It waits for nothing but the step
// before the last. On GPUs a step is a CUDA graph; on the CPU, where there are none, the same function runs each time.
// Ranks are threads here. The engine gives the memory of all outputs.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <span>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "deep_ep/buffer.hpp"
#ifdef EXAMPLE_WITH_CUDA
#include <cuda_runtime_api.h>
#endif

namespace {

constexpr int kRanks = 2;
constexpr int kLayers = 3;
constexpr int kSteps = 8;
constexpr std::int64_t kTokens = 6;  // of a micro-batch: a graph has fixed sizes, unused places select no expert
constexpr std::int64_t kHidden = 256;
constexpr std::int64_t kTopk = 2;
constexpr std::int64_t kExperts = 8;  // experts 0..3 live on rank 0, 4..7 on rank 1

std::uint16_t to_bf16(float value) {  // exact for the values used here
  std::uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof(bits));
  return static_cast<std::uint16_t>(bits >> 16);
}

/// Work on a stream that is enqueued again and again.
class Recorded {
 public:
#ifdef EXAMPLE_WITH_CUDA
  Recorded(bool on_gpu, deep_ep::StreamHandle stream, std::function<void()> enqueue)
      : stream_(static_cast<cudaStream_t>(stream)), enqueue_(std::move(enqueue)) {
    if (!on_gpu) return;
    // Other threads, which are ranks, allocate meanwhile.
    check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    enqueue_();
    check(cudaStreamEndCapture(stream_, &graph_));
    check(cudaGraphInstantiate(&executable_, graph_, 0));
  }
  ~Recorded() {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    if (graph_ != nullptr) cudaGraphDestroy(graph_);
  }
  void launch() { executable_ == nullptr ? enqueue_() : check(cudaGraphLaunch(executable_, stream_)); }

 private:
  static void check(cudaError_t result) {
    if (result != cudaSuccess) throw std::runtime_error(cudaGetErrorString(result));
  }

  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
#else
  Recorded(bool /*on_gpu*/, deep_ep::StreamHandle /*stream*/, std::function<void()> enqueue)
      : enqueue_(std::move(enqueue)) {}
  void launch() { enqueue_(); }

 private:
#endif
  std::function<void()> enqueue_;

 public:
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;
};

/// What one step needs of one micro-batch. The host has its copies in pinned memory, so that copying can be recorded.
class MicroBatch {
 public:
  explicit MicroBatch(std::shared_ptr<deep_ep::Executor> executor) : executor_(std::move(executor)) {
    const auto pinned = [&](std::size_t bytes) { return executor_->allocate_pinned(bytes); };
    values = static_cast<std::uint16_t*>(pinned(kXBytes));
    experts = static_cast<std::int64_t*>(pinned(kIdxBytes));
    results = static_cast<std::uint16_t*>(pinned(kXBytes));
    const auto device = [&](deep_ep::DType dtype, std::int64_t columns, std::size_t bytes) {
      return deep_ep::TensorView::contiguous(executor_->allocate(bytes), dtype, {kTokens, columns},
                                             executor_->device());
    };
    x = device(deep_ep::DType::bfloat16, kHidden, kXBytes);
    topk_idx = device(deep_ep::DType::int64, kTopk, kIdxBytes);
    topk_weights = device(deep_ep::DType::float32, kTopk, kTokens * kTopk * sizeof(float));
    const std::vector<float> weights(kTokens * kTopk, 0.25F);
    executor_->copy(topk_weights.data, weights.data(), weights.size() * sizeof(float), nullptr);
    executor_->synchronize(nullptr);
  }
  ~MicroBatch() {
    for (void* memory : {x.data, topk_idx.data, topk_weights.data}) executor_->free(memory);
    executor_->free_pinned(values);
    executor_->free_pinned(experts);
    executor_->free_pinned(results);
  }
  MicroBatch(const MicroBatch&) = delete;
  MicroBatch& operator=(const MicroBatch&) = delete;

  void upload(deep_ep::StreamHandle stream) const {
    executor_->copy(x.data, values, kXBytes, stream);
    executor_->copy(topk_idx.data, experts, kIdxBytes, stream);
  }
  void download(deep_ep::StreamHandle stream) const { executor_->copy(results, x.data, kXBytes, stream); }

  std::uint16_t* values;   ///< of the host: what the step begins with
  std::int64_t* experts;   ///< of the host: the selections; a real engine makes them on the GPU, layer by layer
  std::uint16_t* results;  ///< of the host: what the step ends with
  deep_ep::TensorView x, topk_idx, topk_weights;

 private:
  static constexpr std::size_t kXBytes = kTokens * kHidden * sizeof(std::uint16_t);
  static constexpr std::size_t kIdxBytes = kTokens * kTopk * sizeof(std::int64_t);
  std::shared_ptr<deep_ep::Executor> executor_;
};

using Half = std::array<std::unique_ptr<MicroBatch>, 2>;

/// The memory of everything that calls return: the engine owns it, and a step takes the same pieces each time.
class Outputs : public deep_ep::ResultTensors {
 public:
  explicit Outputs(std::shared_ptr<deep_ep::Executor> executor)
      : executor_(std::move(executor)), memory_(static_cast<std::byte*>(executor_->allocate(kBytes))) {}
  ~Outputs() override { executor_->free(memory_); }
  Outputs(const Outputs&) = delete;
  Outputs& operator=(const Outputs&) = delete;

  /// A step of this half begins, and the one before with the same half has ended.
  void begin(std::size_t half) {
    next_ = half * kBytes / 2;
    end_ = next_ + kBytes / 2;
  }

  std::vector<deep_ep::Tensor> make(std::span<const deep_ep::TensorView> wanted, const Order& /*order*/,
                                    const std::shared_ptr<deep_ep::HeapPieces>& heap) override {
    if (heap != nullptr) return {};  // rows come through the window
    std::vector<deep_ep::Tensor> tensors;
    for (deep_ep::TensorView view : wanted) {
      const std::size_t bytes = (view.bytes() + kAlignment - 1) / kAlignment * kAlignment;
      if (bytes > end_ - next_) throw deep_ep::OutOfMemory("the engine's memory for outputs is too small");
      view.data = memory_ + next_;
      next_ += bytes;
      tensors.push_back(deep_ep::Tensor::borrow(view));
    }
    return tensors;
  }

 private:
  static constexpr std::size_t kAlignment = 256;
  static constexpr std::size_t kBytes = std::size_t{4} << 20;
  std::shared_ptr<deep_ep::Executor> executor_;
  std::byte* memory_;
  std::size_t next_ = 0;
  std::size_t end_ = 0;
};

class Engine {
 public:
  Engine(int rank, const std::shared_ptr<deep_ep::Bootstrap>& bootstrap)
      : rank_(rank),
        on_gpu_(deep_ep::cuda_device_count() >= kRanks),
        executor_(on_gpu_ ? deep_ep::make_cuda_executor(rank) : deep_ep::make_host_executor()),
        outputs_(std::make_shared<Outputs>(executor_)),
        buffer_(bootstrap, executor_, options()) {
    executor_->make_current();
    stream_ = executor_->create_stream();
    for (Half& half : halves_) {
      for (auto& batch : half) batch = std::make_unique<MicroBatch>(executor_);
    }
  }
  ~Engine() { executor_->destroy_stream(stream_); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  bool run() {
    // Once without recording: what is set up at first use is set up then. All ranks make the same calls.
    write_inputs(0);
    step(0);
    executor_->synchronize(stream_);

    std::array<std::unique_ptr<Recorded>, 2> steps;
    for (std::size_t half = 0; half < 2; ++half) {
      steps[half] = std::make_unique<Recorded>(on_gpu_, stream_, [this, half] { step(half); });
    }
    std::array<deep_ep::EventHandle, 2> done;
    bool correct = true;
    for (int number = 0; number < kSteps + 2; ++number) {
      const auto half = static_cast<std::size_t>(number % 2);
      if (number >= 2) {  // of the step before the last: the last one is running
        executor_->synchronize_event(done[half]);
        correct = correct && right_results(number - 2);
      }
      if (number >= kSteps) continue;
      write_inputs(number);
      steps[half]->launch();
      done[half] = executor_->record_event(stream_);
    }
    executor_->synchronize(stream_);
    for (auto& each : steps) each.reset();
    buffer_.destroy();  // collective: no rank frees what a peer still writes to
    return correct;
  }

 private:
  deep_ep::BufferOptions options() const {
    deep_ep::BufferOptions options;
    options.result_tensors = outputs_;
    options.heap_bytes = std::size_t{16} << 20;
    options.low_latency.bytes = deep_ep::Buffer::low_latency_bytes_hint(kTokens, kHidden, kRanks, kExperts);
    return options;
  }

  /// Enqueues a step. The experts hand back their rows, and two weights of 1/4 halve them in every layer.
  void step(std::size_t number) {
    const Half& half = halves_[number];
    outputs_->begin(number);
    deep_ep::CallOptions call;
    call.stream = stream_;
    for (const auto& batch : half) batch->upload(stream_);
    for (int layer = 0; layer < kLayers; ++layer) {
      std::array<deep_ep::LowLatencyDispatchResult, 2> received;
      std::array<deep_ep::LowLatencyCombineResult, 2> combined;
      for (std::size_t i = 0; i < 2; ++i) {
        // ... attention of micro-batch i: the rows of the other one travel ...
        deep_ep::LowLatencyDispatchArguments arguments;
        arguments.x = half[i]->x;
        arguments.topk_idx = half[i]->topk_idx;
        arguments.max_tokens = kTokens;
        arguments.num_experts = kExperts;
        arguments.format = deep_ep::LowLatencyFormat::bf16;
        arguments.return_recv_hook = true;
        received[i] = buffer_.low_latency_dispatch(arguments, call);
      }
      for (std::size_t i = 0; i < 2; ++i) {
        received[i].hook();
        // ... experts of micro-batch i ...
        deep_ep::LowLatencyCombineArguments arguments;
        arguments.x = received[i].recv_x.view();
        arguments.topk_idx = half[i]->topk_idx;
        arguments.topk_weights = half[i]->topk_weights;
        arguments.handle = &received[i].handle;
        arguments.out = half[i]->x;  // what the next layer begins with
        arguments.return_recv_hook = true;
        combined[i] = buffer_.low_latency_combine(arguments, call);
      }
      for (auto& each : combined) each.hook();
    }
    for (const auto& batch : half) batch->download(stream_);
  }

  static float value_of(int number, std::size_t batch, std::int64_t token) {
    return static_cast<float>(8 * ((number + static_cast<int>(batch)) % 5) + static_cast<int>(token) + 1);
  }
  /// The batch shrinks as requests end.
  static std::int64_t tokens_of(int number) { return kTokens - number / 2; }

  void write_inputs(int number) {
    const Half& half = halves_[static_cast<std::size_t>(number % 2)];
    for (std::size_t i = 0; i < 2; ++i) {
      for (std::int64_t t = 0; t < kTokens; ++t) {
        const bool used = t < tokens_of(number);
        std::uint16_t* row = half[i]->values + t * kHidden;
        std::fill(row, row + kHidden, to_bf16(used ? value_of(number, i, t) : 0));
        for (std::int64_t k = 0; k < kTopk; ++k) {
          half[i]->experts[t * kTopk + k] = used ? (t + number + rank_ + 3 * k) % kExperts : -1;
        }
      }
    }
  }

  bool right_results(int number) const {
    const Half& half = halves_[static_cast<std::size_t>(number % 2)];
    for (std::size_t i = 0; i < 2; ++i) {
      for (std::int64_t t = 0; t < tokens_of(number); ++t) {
        const std::uint16_t wanted = to_bf16(value_of(number, i, t) / (1 << kLayers));
        for (std::int64_t c = 0; c < kHidden; ++c) {
          if (half[i]->results[t * kHidden + c] != wanted) return false;
        }
      }
    }
    return true;
  }

  int rank_;
  bool on_gpu_;
  std::shared_ptr<deep_ep::Executor> executor_;
  std::shared_ptr<Outputs> outputs_;
  deep_ep::Buffer buffer_;
  deep_ep::StreamHandle stream_ = nullptr;
  std::array<Half, 2> halves_;
};

}  // namespace

int main() {
  const auto bootstraps = deep_ep::make_thread_bootstraps(kRanks);
  std::vector<int> correct(kRanks, 0);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const auto at = static_cast<std::size_t>(rank);
      try {
        correct[at] = Engine(rank, bootstraps[at]).run() ? 1 : 0;
        std::printf("rank %d: %s\n", rank, correct[at] != 0 ? "every token of every step is right" : "WRONG tokens");
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return correct[0] != 0 && correct[1] != 0 ? 0 : 1;
}
