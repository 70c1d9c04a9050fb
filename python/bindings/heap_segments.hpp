// The allocator of which PyTorch's pools of the heap get their segments.
#pragma once

#include <memory>
#include <utility>

#include "deep_ep/result_tensors.hpp"

namespace deep_ep::bindings {

/// While it lives, segments that PyTorch asks for in this thread come from `heap`.
class SegmentsFrom {
 public:
  explicit SegmentsFrom(const std::shared_ptr<HeapPieces>& heap);
  ~SegmentsFrom();
  SegmentsFrom(const SegmentsFrom&) = delete;
  SegmentsFrom& operator=(const SegmentsFrom&) = delete;

 private:
  std::shared_ptr<HeapPieces> before_;
};

}  // namespace deep_ep::bindings
