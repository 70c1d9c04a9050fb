// Memory for results from the program's own allocator.
#pragma once

#include <cstddef>
#include <memory>

#include "deep_ep/executor.hpp"

namespace deep_ep {

/// The source of memory for results on a GPU, except for those that peers write into the heap: a framework's
/// caching allocator, so that the framework counts it, reclaims it, and reuses it within a CUDA graph that is being
/// recorded. See BufferOptions::result_allocator.
class ResultAllocator {
 public:
  /// A piece of memory of `allocate`.
  struct Memory {
    void* data = nullptr;              ///< aligned to 256 bytes
    std::shared_ptr<void> owner = {};  ///< the last copy gives the memory back
  };

  virtual ~ResultAllocator() = default;

  /// @param bytes 1 or more. @param device of the buffer. Called by the thread that makes a call. Work on `stream` may
  /// use the memory at once. It is given back by any thread, when other streams no longer use it: what is enqueued on
  /// `stream` afterwards may use it again. Throws OutOfMemory.
  virtual Memory allocate(std::size_t bytes, const Device& device, StreamHandle stream) = 0;
};

}  // namespace deep_ep
