// Memory for received tensors: blocks of the symmetric heap, handed out and taken back in stream order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "csrc/memory/symmetric_heap.hpp"
#include "deep_ep/executor.hpp"
#include "deep_ep/result_tensors.hpp"

namespace deep_ep {

/// Best-fit allocator of the part [offset, offset + bytes) of the heap. Thread-safe.
///
/// A block is given back while kernels of other streams may still use it, together with events behind that use. The
/// stream that gets the memory next waits for them; the host never does. After that the rest of the free piece needs no
/// events any more: blocks are handed out in the order of one stream, the home, so all users come after the wait.
///
/// Replays of a CUDA graph write memory at any later time, so a home that records gets none, and blocks that a graph
/// may touch are pinned: they are not handed out again as long as the arena lives.
class Arena {
 public:
  /// Starts and sizes of blocks are multiples of this. More than the 128 bytes that rows need, so that tensors start as
  /// aligned as those of other GPU allocators.
  static constexpr std::size_t kAlignment = 512;

  struct Block {
    std::uint64_t offset = 0;  ///< in the heap
    std::size_t bytes = 0;
    bool operator==(const Block&) const = default;
  };

  /// `offset` and `bytes` are shrunk to multiples of kAlignment. InvalidArgument if they reach beyond the heap.
  Arena(std::shared_ptr<Executor> executor, std::shared_ptr<SymmetricHeap> heap, std::uint64_t offset,
        std::size_t bytes);

  /// For work that is enqueued on `stream` from now on. Nothing if no free piece is large enough.
  std::optional<Block> allocate(std::size_t bytes, StreamHandle stream);

  /// Takes a block back; `events` are behind its last uses on other streams. Error if the block is not handed out.
  void release(const Block& block, std::vector<EventHandle> events);
  /// Takes a block back for good.
  void pin(const Block& block);

  std::size_t largest_free() const;
  /// The block in use that `memory` is in.
  std::optional<Block> block_at(const void* memory) const;
  std::byte* address(const Block& block) const { return heap_->local() + block.offset; }
  Executor& executor() const { return *executor_; }

 private:
  struct Free {
    std::size_t bytes = 0;
    std::vector<EventHandle> events;
  };
  using FreeBlocks = std::map<std::uint64_t, Free>;
  void insert_free(std::uint64_t offset, Free block);
  Free take_free(FreeBlocks::iterator block);
  void take_used(const Block& block);
  void thin_out(std::vector<EventHandle>& events) const noexcept;

  std::shared_ptr<Executor> executor_;
  std::shared_ptr<SymmetricHeap> heap_;
  mutable std::mutex mutex_;
  FreeBlocks free_;                                        ///< by offset; neighbours are always merged
  std::set<std::pair<std::size_t, std::uint64_t>> sizes_;  ///< the same blocks as (bytes, offset)
  std::map<std::uint64_t, std::size_t> used_;
};

/// Pieces of the arena for an allocator of the program: see deep_ep/result_tensors.hpp.
class ArenaPieces final : public HeapPieces {
 public:
  explicit ArenaPieces(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

  void* take(std::size_t bytes, StreamHandle stream) override;
  void give_back(void* piece, StreamHandle stream) noexcept override;
  bool contains(const void* memory) const override { return arena_->block_at(memory).has_value(); }
  std::size_t largest_free() const override { return arena_->largest_free(); }

 private:
  std::shared_ptr<Arena> arena_;
};

}  // namespace deep_ep
