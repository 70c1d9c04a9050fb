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
  insert_free(begin, {.bytes = end - begin, .events = {}});
}

std::optional<Arena::Block> Arena::allocate(std::size_t bytes, StreamHandle stream) {
  if (bytes > std::numeric_limits<std::size_t>::max() - kAlignment) return std::nullopt;
  // Empty tensors get a block too: distinct addresses, and no special case.
  const std::size_t wanted = round_up(std::max<std::size_t>(bytes, 1));
  Block block{.offset = 0, .bytes = wanted};
  Free piece;
  {
    const std::lock_guard lock(mutex_);
    const auto fit = sizes_.lower_bound({wanted, 0});
    if (fit == sizes_.end()) return std::nullopt;
    block.offset = fit->second;
    piece = take_free(free_.find(block.offset));
    if (piece.bytes > wanted) insert_free(block.offset + wanted, {.bytes = piece.bytes - wanted, .events = {}});
    used_.emplace(block.offset, wanted);
  }
  try {
    for (const EventHandle& event : piece.events) executor_->wait_event(stream, event);
  } catch (...) {
    release(block, std::move(piece.events));  // nothing has used the block yet
    throw;
  }
  return block;
}

void Arena::release(const Block& block, std::vector<EventHandle> events) {
  const std::lock_guard lock(mutex_);
  take_used(block);
  Free piece{.bytes = block.bytes, .events = std::move(events)};
  std::uint64_t offset = block.offset;
  const auto absorb = [&](FreeBlocks::iterator neighbour) {
    const Free other = take_free(neighbour);
    piece.bytes += other.bytes;
    piece.events.insert(piece.events.end(), other.events.begin(), other.events.end());
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
}

std::size_t Arena::largest_free() const {
  const std::lock_guard lock(mutex_);
  return sizes_.empty() ? 0 : sizes_.rbegin()->first;
}

std::optional<Arena::Block> Arena::block_at(const void* memory) const {
  if (!heap_->contains(memory)) return std::nullopt;
  const std::uint64_t at = heap_->offset_of(memory);
  const std::lock_guard lock(mutex_);
  const auto behind = used_.upper_bound(at);
  if (behind == used_.begin()) return std::nullopt;
  const auto& [offset, bytes] = *std::prev(behind);
  return at < offset + bytes ? std::optional(Block{.offset = offset, .bytes = bytes}) : std::nullopt;
}

void Arena::insert_free(std::uint64_t offset, Free block) {
  sizes_.emplace(block.bytes, offset);
  free_.emplace(offset, std::move(block));
}

Arena::Free Arena::take_free(FreeBlocks::iterator block) {
  sizes_.erase({block->second.bytes, block->first});
  Free taken = std::move(block->second);
  free_.erase(block);
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
void Arena::thin_out(std::vector<EventHandle>& events) const noexcept {
  constexpr std::size_t kMany = 8;
  if (events.size() < 2) return;
  std::sort(events.begin(), events.end());
  events.erase(std::unique(events.begin(), events.end()), events.end());
  if (events.size() <= kMany) return;
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
  const auto block = arena_->allocate(bytes, stream);
  return block ? arena_->address(*block) : nullptr;
}

void ArenaPieces::give_back(void* piece, StreamHandle stream) noexcept {
  try {
    const auto block = arena_->block_at(piece);
    if (!block || arena_->address(*block) != piece) return;
    // A graph that is being recorded would be the only one that could wait.
    if (arena_->executor().is_capturing(stream)) return arena_->pin(*block);
    arena_->release(*block, {arena_->executor().record_event(stream)});
  } catch (const std::exception& error) {
    // At exit the driver may be gone, and the memory goes with it.
    log::debug("a piece of the heap was not given back: {}", error.what());
  }
}

}  // namespace deep_ep
