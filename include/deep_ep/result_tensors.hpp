// Results as tensors of the program's framework.
#pragma once
// SPDX-License-Identifier: MIT

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// The part of a buffer's symmetric heap for results, for an allocator of the program. Thread-safe. It keeps the heap's
/// memory, also beyond the buffer's end.
class HeapPieces {
 public:
  virtual ~HeapPieces() = default;
  /// A piece of `bytes`, aligned to 512, for later work on `stream` that comes behind the buffer's calls so far;
  /// nullptr: the heap has no room.
  virtual void* take(std::size_t bytes, StreamHandle stream) = 0;
  /// Frees `piece` of `take`, of as many bytes. Work that `stream` holds now may still use it.
  virtual void give_back(void* piece, std::size_t bytes, StreamHandle stream) noexcept = 0;
  /// Whether `memory` is in this part of the heap.
  virtual bool contains(const void* memory) const = 0;
  /// The bytes of the largest free piece.
  virtual std::size_t largest_free() const = 0;
};

/// Makes the tensors that calls return as tensors of the program's framework, which then owns, counts and frees their
/// memory. See BufferOptions::result_tensors. Calls hold copies of the tensors until their kernels are enqueued.
class ResultTensors {
 public:
  /// The streams that use the memory.
  struct Order {
    StreamHandle stream = nullptr;  ///< the memory is free for work that is enqueued here from now on
    /// A second user, for which `stream` does not wait: after the memory is freed, `stream` may use it again only when
    /// the work that this stream then holds has ended.
    std::optional<StreamHandle> other = {};
  };

  virtual ~ResultTensors() = default;
  /// One tensor for each of `wanted`, of its dtype, shape, strides (without gaps) and device, for `order`. Tensors
  /// without elements have an address, too. The thread that makes a call calls it. Throws OutOfMemory.
  /// @param heap given: in pieces of it, where peers write rows straight into place; never while `order.stream` is
  /// being recorded. Returns nothing if there is no room. The library ignores tensors that are elsewhere.
  virtual std::vector<Tensor> make(std::span<const TensorView> wanted, const Order& order,
                                   const std::shared_ptr<HeapPieces>& heap) = 0;
};

}  // namespace deep_ep
