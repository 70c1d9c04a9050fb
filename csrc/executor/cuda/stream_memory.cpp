#include "csrc/executor/cuda/stream_memory.hpp"

#include <algorithm>
#include <cstdint>
#include <limits>

#include "csrc/executor/cuda/context.hpp"

namespace deep_ep::cuda {

StreamMemory::StreamMemory(std::shared_ptr<const Context> context) : context_(std::move(context)) {
  const CurrentContext current(*context_);
  const int device = context_->device();
  cudaMemPoolProps properties{};
  properties.allocType = cudaMemAllocationTypePinned;
  properties.handleTypes = cudaMemHandleTypeNone;
  properties.location.type = cudaMemLocationTypeDevice;
  properties.location.id = device;
  check(cudaMemPoolCreate(&pool_, &properties), device, "cudaMemPoolCreate");
  try {
    std::uint64_t keep_all = std::numeric_limits<std::uint64_t>::max();
    check(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep_all), device,
          "cudaMemPoolSetAttribute(ReleaseThreshold)");
    check(cudaStreamCreateWithFlags(&outside_, cudaStreamNonBlocking), device, "cudaStreamCreateWithFlags");
  } catch (...) {
    close();
    throw;
  }
}

StreamMemory::~StreamMemory() {
  quietly([&] {
    const CurrentContext current(*context_);
    const RelaxedCapture relaxed;
    for (void* memory : kept_) cudaFreeAsync(memory, outside_);
    close();
  });
}

void StreamMemory::close() noexcept {
  if (outside_ != nullptr) cudaStreamDestroy(outside_);
  // Memory of tensors that are still alive stays valid; the driver frees the pool with the last of them.
  if (pool_ != nullptr) cudaMemPoolDestroy(pool_);
}

void* StreamMemory::allocate(std::size_t bytes, cudaStream_t stream) {
  bytes = std::max<std::size_t>(bytes, 1);
  return is_capturing(stream, context_->device()) ? allocate_for_graph(bytes) : take(bytes, stream);
}

void* StreamMemory::take(std::size_t bytes, cudaStream_t stream) {
  void* memory = nullptr;
  cudaError_t result = cudaMallocFromPoolAsync(&memory, bytes, pool_, stream);
  if (result == cudaErrorMemoryAllocation) {
    cudaGetLastError();  // or the next launch would report it
    trim();              // what lies in pieces of the wrong sizes
    result = cudaMallocFromPoolAsync(&memory, bytes, pool_, stream);
  }
  check(result, context_->device(), "cudaMallocFromPoolAsync of {}", format_bytes(bytes));
  return memory;
}

std::size_t StreamMemory::reserved() const {
  std::uint64_t bytes = 0;
  check(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrReservedMemCurrent, &bytes), context_->device(),
        "cudaMemPoolGetAttribute(ReservedMemCurrent)");
  return bytes;
}

std::size_t StreamMemory::trim() {
  const RelaxedCapture relaxed;
  const std::size_t before = reserved();
  check(cudaMemPoolTrimTo(pool_, 0), context_->device(), "cudaMemPoolTrimTo");
  const std::size_t after = reserved();
  return before > after ? before - after : 0;
}

void* StreamMemory::allocate_for_graph(std::size_t bytes) {
  const RelaxedCapture relaxed;
  void* memory = take(bytes, outside_);
  {
    const std::lock_guard lock(mutex_);
    kept_.insert(memory);
  }
  // The graph's streams do not wait for `outside_`, so the memory must be there now.
  check(cudaStreamSynchronize(outside_), context_->device(), "cudaStreamSynchronize");
  return memory;
}

void StreamMemory::free(void* memory, cudaStream_t stream) {
  if (memory == nullptr) return;
  const bool recording = is_capturing(stream, context_->device());
  {
    const std::lock_guard lock(mutex_);
    if (recording) kept_.insert(memory);
    if (kept_.contains(memory)) return;
  }
  check(cudaFreeAsync(memory, stream), context_->device(), "cudaFreeAsync");
}

}  // namespace deep_ep::cuda
