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
  if (begin < end) free_[heap_->local() + begin].bytes = end - begin;
}

void* Arena::take(std::size_t bytes, StreamHandle stream) {
  if (bytes > std::numeric_limits<std::size_t>::max() - kAlignment) return nullptr;
  // Empty tensors get a piece too: distinct addresses, and no special case.
  const std::size_t wanted = round_up(std::max<std::size_t>(bytes, 1));
  const std::byte* at = nullptr;
  Free piece;
  {
    const std::lock_guard lock(mutex_);
    auto best = free_.end();
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->second.bytes >= wanted && (best == free_.end() || it->second.bytes < best->second.bytes)) best = it;
    }
    if (best == free_.end()) return nullptr;
    at = best->first;
    piece = std::move(best->second);
    free_.erase(best);
    if (piece.bytes > wanted) free_[at + wanted].bytes = piece.bytes - wanted;
    used_.emplace(at, wanted);
  }
  auto* const memory = const_cast<std::byte*>(at);
  try {
    for (const EventHandle& event : piece.events) executor_->wait_event(stream, event);
  } catch (...) {
    release(memory, std::move(piece.events));  // nothing has used it yet
    throw;
  }
  return memory;
}

void Arena::release(void* memory, std::optional<std::vector<EventHandle>> events) {
  const auto* at = static_cast<const std::byte*>(memory);
  const std::lock_guard lock(mutex_);
  const auto used = used_.find(at);
  if (used == used_.end()) {
    fail<Error>("arena piece at offset {} is not handed out (given back twice?)", heap_->offset_of(at));
  }
  Free piece{.bytes = used->second, .events = {}};
  used_.erase(used);
  if (!events) return;
  piece.events = *std::move(events);
  const auto absorb = [&](std::map<const std::byte*, Free>::iterator neighbour) {
    const Free& other = neighbour->second;
    piece.bytes += other.bytes;
    piece.events.insert(piece.events.end(), other.events.begin(), other.events.end());
    return free_.erase(neighbour);
  };
  auto next = free_.lower_bound(at);
  if (next != free_.end() && next->first == at + piece.bytes) next = absorb(next);
  if (next != free_.begin()) {
    const auto previous = std::prev(next);
    if (previous->first + previous->second.bytes == at) {
      at = previous->first;
      absorb(previous);
    }
  }
  thin_out(piece.events);
  free_.emplace(at, std::move(piece));
}

void Arena::give_back(void* piece, StreamHandle stream) noexcept {
  try {
    // A graph that is being recorded would be the only one that could wait.
    if (executor_->is_capturing(stream)) return release(piece, std::nullopt);
    release(piece, std::vector{executor_->record_event(stream)});
  } catch (const std::exception& error) {
    // At exit the driver may be gone, and the memory goes with it.
    log::debug("a piece of the heap was not given back: {}", error.what());
  }
}

bool Arena::contains(const void* memory) const {
  const auto* at = static_cast<const std::byte*>(memory);
  const std::lock_guard lock(mutex_);
  const auto behind = used_.upper_bound(at);
  if (behind == used_.begin()) return false;
  const auto& [begin, bytes] = *std::prev(behind);
  return at < begin + bytes;
}

std::size_t Arena::largest_free() const {
  const std::lock_guard lock(mutex_);
  std::size_t largest = 0;
  for (const auto& [at, piece] : free_) largest = std::max(largest, piece.bytes);
  return largest;
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
      // The work before it failed. Kept, it reports that to whoever waits for it; throwing here would lose the piece.
      return false;
    }
  });
}

}  // namespace deep_ep
