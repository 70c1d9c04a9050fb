// Results as tensors of the program's framework.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// The part of a buffer's symmetric heap that results may lie in, for an allocator of the program. Thread-safe. It
/// keeps the memory of the heap, also beyond the buffer's end.
class HeapPieces {
 public:
  virtual ~HeapPieces() = default;
  /// A piece of `bytes`, aligned to 512, that later work on `stream` may use; nullptr: the heap has no room.
  virtual void* take(std::size_t bytes, StreamHandle stream) = 0;
  /// Takes back `piece`, which `take` returned. Work that `stream` holds now may still use it.
  virtual void give_back(void* piece, StreamHandle stream) noexcept = 0;
  /// Whether `memory` lies in a piece that is handed out.
  virtual bool contains(const void* memory) const = 0;
  /// The most bytes that `take` has room for.
  virtual std::size_t largest_free() const = 0;
};

/// Makes the tensors that calls return as tensors of the program's framework, which owns them from then on: it counts
/// their memory, frees it when the program says so, and keeps it for the streams that the program names. See
/// BufferOptions::result_tensors. Calls hold copies of the tensors until their kernels are enqueued.
class ResultTensors {
 public:
  /// The streams that memory is made for.
  struct Order {
    StreamHandle stream = nullptr;  ///< the memory is free for work that is enqueued here from now on
    /// Uses the memory, too, and `stream` does not wait for it: after the memory is freed, `stream` may use it again
    /// only when the work that is then enqueued here has ended.
    std::optional<StreamHandle> other = {};
  };

  virtual ~ResultTensors() = default;
  /// One tensor for each of `wanted`, of its type, shape, strides (without gaps) and device, for `order`. Tensors
  /// without elements have an address, too. Called by the thread that makes a call. Throws OutOfMemory.
  virtual std::vector<Tensor> make(std::span<const TensorView> wanted, const Order& order) = 0;
  /// The same in pieces of `heap`, where peers write rows straight into place; never while `order.stream` is being
  /// recorded. Empty: there is no room, or it cannot be had. Tensors that lie elsewhere are not used.
  virtual std::vector<Tensor> make_in_heap(std::span<const TensorView> wanted, const Order& order,
                                           const std::shared_ptr<HeapPieces>& heap) = 0;
};

}  // namespace deep_ep
