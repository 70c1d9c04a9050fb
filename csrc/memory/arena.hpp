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

namespace deep_ep {

/// Best-fit allocator of the part [offset, offset + bytes) of the heap. Thread-safe.
///
/// Blocks are handed out in the order of one stream, the home. A block is given back while kernels of other streams may
/// still use it, together with events behind that use. Whoever gets the memory next lets the home wait for them; the
/// host never waits. After that the rest of the free piece needs no events any more: all its users come after the wait.
///
/// Blocks that a CUDA graph may touch are pinned: replays write them at any later time, so they are not handed out
/// again as long as the arena lives. For the same reason a home that records gets only memory without pending events:
/// its replays could not wait for them. That the home itself has finished with the memory is up to the caller.
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
    std::size_t used = 0;    ///< handed out, pinned ones included
    std::size_t pinned = 0;  ///< lost to CUDA graphs
    std::size_t largest_free = 0;
  };

  /// `offset` and `bytes` are shrunk to multiples of kAlignment. InvalidArgument if they reach beyond the heap.
  Arena(std::shared_ptr<Executor> executor, std::shared_ptr<SymmetricHeap> heap, std::uint64_t offset,
        std::size_t bytes);

  /// Nothing if no free piece is large enough. `capturing`: the home records a graph.
  std::optional<Allocation> allocate(std::size_t bytes, bool capturing = false);

  /// Takes a block back; `events` are behind its last uses on other streams. Error if the block is not handed out.
  void release(const Block& block, std::vector<EventHandle> events);
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
  using FreeBlocks = std::map<std::uint64_t, Free>;

  FreeBlocks::iterator find_fit(std::size_t bytes, bool capturing);
  void insert_free(std::uint64_t offset, Free block);
  void erase_free(FreeBlocks::iterator block);
  void take_used(const Block& block);
  void drop_done(std::vector<EventHandle>& events) const noexcept;
  void thin_out(std::vector<EventHandle>& events) const;

  std::shared_ptr<Executor> executor_;
  std::shared_ptr<SymmetricHeap> heap_;
  std::size_t total_ = 0;

  mutable std::mutex mutex_;
  FreeBlocks free_;                                          ///< by offset; neighbours are always merged
  std::set<std::pair<std::size_t, std::uint64_t>> by_size_;  ///< the same blocks as (bytes, offset)
  std::map<std::uint64_t, std::size_t> used_;
  std::size_t used_bytes_ = 0;
  std::size_t pinned_bytes_ = 0;
};

}  // namespace deep_ep
