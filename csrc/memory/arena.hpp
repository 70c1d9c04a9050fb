// Memory for received tensors: pieces of the symmetric heap, handed out and taken back in stream order.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "deep_ep/executor.hpp"
#include "deep_ep/result_tensors.hpp"

namespace deep_ep {

/// Best-fit allocator of a part of the heap. Thread-safe.
///
/// A piece is given back while kernels of other streams may still use it, together with events behind that use. The
/// stream that gets the memory next waits for them; the host never does. After the home has waited the rest of the free
/// piece needs no events any more: all users come behind the buffer's calls. For other streams those of work that has
/// ended are dropped first, or they would pile up.
///
/// Replays of a CUDA graph write memory at any later time, so the home gets no piece while it records, and pieces
/// that a graph may touch do not come back as long as the arena lives.
class Arena final : public HeapPieces {
 public:
  /// Starts and sizes of pieces are multiples of this. More than the 128 bytes that rows need, so that tensors start as
  /// aligned as those of other GPU allocators.
  static constexpr std::size_t kAlignment = 512;

  /// Of `bytes` bytes from `part` on, which keeps the heap, those between multiples of kAlignment.
  Arena(std::shared_ptr<Executor> executor, std::shared_ptr<std::byte> part, std::size_t bytes);

  /// Takes a piece of `bytes` back; `events` are behind its last uses on other streams. Error where not all of it is
  /// handed out.
  void release(void* piece, std::size_t bytes, std::vector<EventHandle> events);

  /// See HeapPieces. `at_home`: `stream` is that of the call under way.
  void* take(std::size_t bytes, StreamHandle stream, bool at_home);

  void* take(std::size_t bytes, StreamHandle stream) override { return take(bytes, stream, false); }
  void give_back(void* piece, std::size_t bytes, StreamHandle stream) noexcept override;
  bool contains(const void* memory) const override { return memory >= begin_ && memory < end_; }
  std::size_t largest_free() const override;

 private:
  struct Piece {
    std::size_t bytes = 0;
    std::vector<EventHandle> events;
  };
  using Pieces = std::map<std::byte*, Piece>;
  void merge_with_next(Pieces::iterator piece);

  std::shared_ptr<Executor> executor_;
  std::shared_ptr<std::byte> part_;
  std::byte *begin_, *end_;
  mutable std::mutex mutex_;
  Pieces free_;  ///< neighbours are always merged
};

}  // namespace deep_ep
