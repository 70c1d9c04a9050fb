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
/// Blocks are handed out in the order of one stream, the home. A block is given back while kernels of other streams may
/// still use it, together with events behind that use. Whoever gets the memory next lets the home wait for them; the
/// host never waits. After that the rest of the free piece needs no events any more: all its users come after the wait.
///
/// Memory that was handed out to a CUDA graph is from then on for graphs alone: replays write it at any later time, but
/// those of an arena's graphs run one after the other, as their calls do. So what a graph gives back is the next one's,
/// or a later call's of the same graph. Other blocks that a graph may touch are pinned: they are not handed out again
/// as long as the arena lives. A home that records gets only memory without pending events: its replays could not wait
/// for them. That the home itself has finished with the memory is up to the caller.
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
  struct Allocation {
    Block block;
    std::vector<EventHandle> wait_for;  ///< what the home has to wait for, now
  };
  struct Usage {
    std::size_t total = 0;
    std::size_t used = 0;        ///< handed out, pinned ones included
    std::size_t pinned = 0;      ///< lost to CUDA graphs
    std::size_t for_graphs = 0;  ///< free, but only for a home that records
    std::size_t largest_free = 0;
  };

  /// `offset` and `bytes` are shrunk to multiples of kAlignment. InvalidArgument if they reach beyond the heap.
  Arena(std::shared_ptr<Executor> executor, std::shared_ptr<SymmetricHeap> heap, std::uint64_t offset,
        std::size_t bytes);

  /// Nothing if no free piece is large enough. `capturing`: the home records a graph.
  std::optional<Allocation> allocate(std::size_t bytes, bool capturing = false);

  /// Takes a block back; `events` are behind its last uses on other streams. Error if the block is not handed out.
  void release(const Block& block, std::vector<EventHandle> events);
  /// Takes a block back that a graph goes on using: only a home that records gets it again.
  void release_to_graphs(const Block& block, std::vector<EventHandle> events);
  /// Takes a block back for good.
  void pin(const Block& block);

  Usage usage() const;
  std::byte* address(const Block& block) const { return heap_->local() + block.offset; }
  Executor& executor() const { return *executor_; }

 private:
  struct Free {
    std::size_t bytes = 0;
    std::vector<EventHandle> events;
  };
  struct FreeBlocks {
    std::map<std::uint64_t, Free> by_offset;                  ///< neighbours are always merged
    std::set<std::pair<std::size_t, std::uint64_t>> by_size;  ///< the same blocks as (bytes, offset)

    using Iterator = std::map<std::uint64_t, Free>::iterator;
    void insert(std::uint64_t offset, Free block);
    Free take(Iterator block);
  };

  FreeBlocks::Iterator find_fit(FreeBlocks& from, std::size_t bytes, bool capturing) const;
  std::optional<Allocation> allocate_from(FreeBlocks& from, std::size_t bytes, bool capturing);
  void give_back(FreeBlocks& to, const Block& block, std::vector<EventHandle> events);
  void take_used(const Block& block);
  void drop_done(std::vector<EventHandle>& events) const noexcept;
  void thin_out(std::vector<EventHandle>& events) const;

  std::shared_ptr<Executor> executor_;
  std::shared_ptr<SymmetricHeap> heap_;
  std::size_t total_ = 0;

  mutable std::mutex mutex_;
  FreeBlocks free_;
  FreeBlocks graphs_;
  std::map<std::uint64_t, std::size_t> used_;
  std::size_t used_bytes_ = 0;
  std::size_t pinned_bytes_ = 0;
};

/// Pieces of the arena for an allocator of the program: see deep_ep/result_tensors.hpp.
class ArenaPieces final : public HeapPieces {
 public:
  explicit ArenaPieces(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}

  void* take(std::size_t bytes, StreamHandle stream) override;
  void give_back(void* piece, StreamHandle stream) noexcept override;
  bool contains(const void* memory) const override;
  std::size_t largest_free() const override { return arena_->usage().largest_free; }

 private:
  std::shared_ptr<Arena> arena_;
  mutable std::mutex mutex_;
  std::map<const std::byte*, Arena::Block> taken_;
};

}  // namespace deep_ep
