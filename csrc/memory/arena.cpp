#include "csrc/memory/arena.hpp"

#include <algorithm>
#include <exception>
#include <iterator>
#include <limits>

#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
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
  free_.insert(begin, {.bytes = total_, .events = {}});
}

std::optional<Arena::Allocation> Arena::allocate(std::size_t bytes, bool capturing) {
  if (bytes > std::numeric_limits<std::size_t>::max() - kAlignment) return std::nullopt;
  // Empty tensors get a block too: distinct addresses, and no special case.
  const std::size_t wanted = round_up(std::max<std::size_t>(bytes, 1));
  const std::lock_guard lock(mutex_);
  if (capturing) {
    if (auto again = allocate_from(graphs_, wanted, true)) return again;
  }
  return allocate_from(free_, wanted, capturing);
}

std::optional<Arena::Allocation> Arena::allocate_from(FreeBlocks& from, std::size_t bytes, bool capturing) {
  const auto found = find_fit(from, bytes, capturing);
  if (found == from.by_offset.end()) return std::nullopt;
  const std::uint64_t offset = found->first;
  Free piece = from.take(found);
  if (piece.bytes > bytes) from.insert(offset + bytes, {.bytes = piece.bytes - bytes, .events = {}});
  used_.emplace(offset, bytes);
  used_bytes_ += bytes;
  return Allocation{.block = {.offset = offset, .bytes = bytes}, .wait_for = std::move(piece.events)};
}

Arena::FreeBlocks::Iterator Arena::find_fit(FreeBlocks& from, std::size_t bytes, bool capturing) const {
  for (auto candidate = from.by_size.lower_bound({bytes, 0}); candidate != from.by_size.end(); ++candidate) {
    const auto block = from.by_offset.find(candidate->second);
    if (!capturing) return block;
    drop_done(block->second.events);
    if (block->second.events.empty()) return block;
  }
  return from.by_offset.end();
}

void Arena::release(const Block& block, std::vector<EventHandle> events) {
  const std::lock_guard lock(mutex_);
  give_back(free_, block, std::move(events));
}

void Arena::release_to_graphs(const Block& block, std::vector<EventHandle> events) {
  const std::lock_guard lock(mutex_);
  give_back(graphs_, block, std::move(events));
}

void Arena::give_back(FreeBlocks& to, const Block& block, std::vector<EventHandle> events) {
  take_used(block);
  used_bytes_ -= block.bytes;
  Free piece{.bytes = block.bytes, .events = std::move(events)};
  std::uint64_t offset = block.offset;
  const auto absorb = [&](FreeBlocks::Iterator neighbour) {
    const Free other = to.take(neighbour);
    piece.bytes += other.bytes;
    piece.events.insert(piece.events.end(), other.events.begin(), other.events.end());
  };
  auto next = to.by_offset.lower_bound(offset);
  if (next != to.by_offset.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second.bytes == offset) {
      offset = previous->first;
      absorb(previous);
      next = to.by_offset.lower_bound(offset);
    }
  }
  if (next != to.by_offset.end() && next->first == block.offset + block.bytes) absorb(next);
  thin_out(piece.events);
  to.insert(offset, std::move(piece));
}

void Arena::pin(const Block& block) {
  const std::lock_guard lock(mutex_);
  take_used(block);
  pinned_bytes_ += block.bytes;
}

Arena::Usage Arena::usage() const {
  const std::lock_guard lock(mutex_);
  std::size_t for_graphs = 0;
  for (const auto& [bytes, offset] : graphs_.by_size) for_graphs += bytes;
  return {.total = total_,
          .used = used_bytes_,
          .pinned = pinned_bytes_,
          .for_graphs = for_graphs,
          .largest_free = free_.by_size.empty() ? 0 : free_.by_size.rbegin()->first};
}

void Arena::FreeBlocks::insert(std::uint64_t offset, Free block) {
  by_size.emplace(block.bytes, offset);
  by_offset.emplace(offset, std::move(block));
}

Arena::Free Arena::FreeBlocks::take(Iterator block) {
  by_size.erase({block->second.bytes, block->first});
  Free taken = std::move(block->second);
  by_offset.erase(block);
  return taken;
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

void* ArenaPieces::take(std::size_t bytes, StreamHandle stream) {
  const auto allocation = arena_->allocate(bytes);
  if (!allocation) return nullptr;
  std::byte* piece = arena_->address(allocation->block);
  {
    const std::lock_guard lock(mutex_);
    taken_.emplace(piece, allocation->block);
  }
  try {
    for (const EventHandle& event : allocation->wait_for) arena_->executor().wait_event(stream, event);
  } catch (...) {
    // Nothing has used the piece yet.
    const std::lock_guard lock(mutex_);
    taken_.erase(piece);
    arena_->release(allocation->block, allocation->wait_for);
    throw;
  }
  return piece;
}

void ArenaPieces::give_back(void* piece, StreamHandle stream) noexcept {
  try {
    Arena::Block block;
    {
      const std::lock_guard lock(mutex_);
      const auto found = taken_.find(static_cast<std::byte*>(piece));
      if (found == taken_.end()) return;
      block = found->second;
      taken_.erase(found);
    }
    // A graph that is being recorded would be the only one that could wait.
    if (arena_->executor().is_capturing(stream)) return arena_->pin(block);
    arena_->release(block, {arena_->executor().record_event(stream)});
  } catch (const std::exception& error) {
    // At exit the driver may be gone, and the memory goes with it.
    log::debug("a piece of the heap was not given back: {}", error.what());
  }
}

bool ArenaPieces::contains(const void* memory) const {
  const auto* at = static_cast<const std::byte*>(memory);
  const std::lock_guard lock(mutex_);
  const auto behind = taken_.upper_bound(at);
  if (behind == taken_.begin()) return false;
  const auto& [begin, block] = *std::prev(behind);
  return at < begin + block.bytes;
}

}  // namespace deep_ep
