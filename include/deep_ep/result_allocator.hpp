// Memory for results from the program's own allocator.
#pragma once
// SPDX-License-Identifier: MIT

#include <cstddef>
#include <memory>

#include "deep_ep/executor.hpp"

namespace deep_ep {

/// The source of memory for results on a GPU, except for those that peers write into the heap. A framework's caching
/// allocator counts the memory, reclaims it, and reuses it within a CUDA graph that is being recorded. See
/// BufferOptions::result_allocator.
class ResultAllocator {
 public:
  /// A piece of memory of `allocate`.
  struct Memory {
    void* data = nullptr;              ///< aligned to 256 bytes
    std::shared_ptr<void> owner = {};  ///< the last copy gives the memory back
  };

  virtual ~ResultAllocator() = default;

  /// The thread that makes a call calls it. Work on `stream` may use the memory at once. Any thread gives it back, when
  /// other streams no longer use it; later work on `stream` may then use it again. Throws OutOfMemory.
  /// @param bytes 1 or more. @param device of the buffer. @param stream of the call.
  virtual Memory allocate(std::size_t bytes, const Device& device, StreamHandle stream) = 0;
};

}  // namespace deep_ep
