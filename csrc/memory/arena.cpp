#include "csrc/memory/arena.hpp"

#include <algorithm>
#include <exception>
#include <iterator>
#include <limits>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

constexpr std::uint64_t round_up(std::uint64_t value) {
  return (value + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
}

}  // namespace

Arena::Arena(std::shared_ptr<Executor> executor, std::shared_ptr<SymmetricHeap> heap, std::uint64_t offset,
             std::size_t bytes)
    : executor_(std::move(executor)), heap_(std::move(heap)) {
  if (offset > heap_->bytes() || bytes > heap_->bytes() - offset) {
    fail<InvalidArgument>("arena of {} bytes at offset {}, allowed: inside the heap of {} bytes", bytes, offset,
                          heap_->bytes());
  }
  const std::uint64_t begin = round_up(offset);
  const std::uint64_t end = (offset + bytes) / kAlignment * kAlignment;
  if (begin >= end) return;
  total_ = end - begin;
  insert_free(begin, {.bytes = total_, .events = {}});
}

std::optional<Arena::Allocation> Arena::allocate(std::size_t bytes, bool capturing) {
  if (bytes > std::numeric_limits<std::size_t>::max() - kAlignment) return std::nullopt;
  // Empty tensors get a block too: distinct addresses, and no special case.
  const std::size_t wanted = round_up(std::max<std::size_t>(bytes, 1));
  const std::lock_guard lock(mutex_);
  const auto found = find_fit(wanted, capturing);
  if (found == free_.end()) return std::nullopt;
  const std::uint64_t offset = found->first;
  Free piece = std::move(found->second);
  erase_free(found);
  if (piece.bytes > wanted) insert_free(offset + wanted, {.bytes = piece.bytes - wanted, .events = {}});
  used_.emplace(offset, wanted);
  used_bytes_ += wanted;
  return Allocation{.block = {.offset = offset, .bytes = wanted}, .wait_for = std::move(piece.events)};
}

Arena::FreeBlocks::iterator Arena::find_fit(std::size_t bytes, bool capturing) {
  for (auto candidate = by_size_.lower_bound({bytes, 0}); candidate != by_size_.end(); ++candidate) {
    const auto block = free_.find(candidate->second);
    if (!capturing) return block;
    drop_done(block->second.events);
    if (block->second.events.empty()) return block;
  }
  return free_.end();
}

void Arena::release(const Block& block, std::vector<EventHandle> events) {
  const std::lock_guard lock(mutex_);
  take_used(block);
  used_bytes_ -= block.bytes;
  Free piece{.bytes = block.bytes, .events = std::move(events)};
  std::uint64_t offset = block.offset;
  const auto absorb = [&](FreeBlocks::iterator neighbour) {
    piece.bytes += neighbour->second.bytes;
    piece.events.insert(piece.events.end(), neighbour->second.events.begin(), neighbour->second.events.end());
    erase_free(neighbour);
  };
  auto next = free_.lower_bound(offset);
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second.bytes == offset) {
      offset = previous->first;
      absorb(previous);
      next = free_.lower_bound(offset);
    }
  }
  if (next != free_.end() && next->first == block.offset + block.bytes) absorb(next);
  thin_out(piece.events);
  insert_free(offset, std::move(piece));
}

void Arena::pin(const Block& block) {
  const std::lock_guard lock(mutex_);
  take_used(block);
  pinned_bytes_ += block.bytes;
}

Arena::Usage Arena::usage() const {
  const std::lock_guard lock(mutex_);
  return {.total = total_,
          .used = used_bytes_,
          .pinned = pinned_bytes_,
          .largest_free = by_size_.empty() ? 0 : by_size_.rbegin()->first};
}

void Arena::insert_free(std::uint64_t offset, Free block) {
  by_size_.emplace(block.bytes, offset);
  free_.emplace(offset, std::move(block));
}

void Arena::erase_free(FreeBlocks::iterator block) {
  by_size_.erase({block->second.bytes, block->first});
  free_.erase(block);
}

void Arena::take_used(const Block& block) {
  const auto found = used_.find(block.offset);
  if (found == used_.end() || found->second != block.bytes) {
    fail<Error>("arena block of {} bytes at offset {} is not handed out (given back twice?)", block.bytes,
                block.offset);
  }
  used_.erase(found);
}

/// Only merging makes events pile up. Asking about one costs as much as waiting for it, so we ask only when there are
/// many.
void Arena::thin_out(std::vector<EventHandle>& events) const {
  constexpr std::size_t kMany = 8;
  if (events.size() < 2) return;
  std::sort(events.begin(), events.end());
  events.erase(std::unique(events.begin(), events.end()), events.end());
  if (events.size() > kMany) drop_done(events);
}

void Arena::drop_done(std::vector<EventHandle>& events) const noexcept {
  std::erase_if(events, [&](const EventHandle& event) {
    try {
      return executor_->event_done(event);
    } catch (const std::exception&) {
      // The work before it failed. Kept, it reports that to whoever waits for it; throwing here would lose the block.
      return false;
    }
  });
}

}  // namespace deep_ep
