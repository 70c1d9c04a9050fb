#include "python/bindings/heap_segments.hpp"

#include <sys/types.h>

#include <exception>
#include <mutex>
#include <unordered_map>

namespace deep_ep::bindings {
namespace {

thread_local std::shared_ptr<HeapPieces> current_heap;  // NOLINT: one thread, one call

/// Segments that are out, each with the heap that it is of, which lives as long.
struct SegmentsOut {
  static SegmentsOut& instance() {
    static auto* out = new SegmentsOut;  // PyTorch frees after static objects have ended
    return *out;
  }
  std::mutex mutex;
  std::unordered_map<void*, std::shared_ptr<HeapPieces>> heap_of;
};

}  // namespace

SegmentsFrom::SegmentsFrom(const std::shared_ptr<HeapPieces>& heap) : before_(std::exchange(current_heap, heap)) {}
SegmentsFrom::~SegmentsFrom() { current_heap = std::move(before_); }

}  // namespace deep_ep::bindings

// The functions that torch.cuda.memory.CUDAPluggableAllocator looks up by name. nullptr: PyTorch has no such memory.

extern "C" __attribute__((visibility("default"))) void* deep_ep_allocate_segment(ssize_t bytes, int /*device*/,
                                                                                 void* stream) {
  using namespace deep_ep::bindings;
  if (current_heap == nullptr || bytes <= 0) return nullptr;
  try {
    void* const segment = current_heap->take(static_cast<std::size_t>(bytes), stream);
    if (segment == nullptr) return nullptr;
    SegmentsOut& out = SegmentsOut::instance();
    const std::lock_guard lock(out.mutex);
    out.heap_of.insert_or_assign(segment, current_heap);
    return segment;
  } catch (const std::exception&) {
    return nullptr;  // PyTorch says so to the call, which takes other memory
  }
}

extern "C" __attribute__((visibility("default"))) void deep_ep_free_segment(void* segment, ssize_t /*bytes*/,
                                                                            int /*device*/, void* stream) {
  using namespace deep_ep::bindings;
  std::shared_ptr<deep_ep::HeapPieces> heap;
  {
    SegmentsOut& out = SegmentsOut::instance();
    const std::lock_guard lock(out.mutex);
    const auto found = out.heap_of.find(segment);
    if (found == out.heap_of.end()) return;
    heap = std::move(found->second);
    out.heap_of.erase(found);
  }
  heap->give_back(segment, stream);
}
