#include "csrc/memory/arena.hpp"

#include <algorithm>
#include <iterator>
#include <limits>

#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep {
namespace {

/// Empty tensors get a piece too: distinct addresses, and no special case.
constexpr std::uint64_t round_up(std::uint64_t value) {
  return (std::max<std::uint64_t>(value, 1) + Arena::kAlignment - 1) / Arena::kAlignment * Arena::kAlignment;
}

}  // namespace

Arena::Arena(std::shared_ptr<Executor> executor, std::shared_ptr<std::byte> part, std::size_t bytes)
    : executor_(std::move(executor)), part_(std::move(part)) {
  const auto at = reinterpret_cast<std::uintptr_t>(part_.get());
  begin_ = part_.get() + (round_up(at) - at);
  end_ = part_.get() + ((at + bytes) / kAlignment * kAlignment - at);
  if (begin_ < end_) free_[begin_].bytes = static_cast<std::size_t>(end_ - begin_);
}

void* Arena::take(std::size_t bytes, StreamHandle stream, bool at_home) {
  if (bytes > std::numeric_limits<std::size_t>::max() - kAlignment) return nullptr;
  const std::size_t wanted = round_up(bytes);
  const std::lock_guard lock(mutex_);
  auto best = free_.end();
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    if (it->second.bytes >= wanted && (best == free_.end() || it->second.bytes < best->second.bytes)) best = it;
  }
  if (best == free_.end()) return nullptr;
  std::byte* const memory = best->first;
  std::vector<EventHandle>& events = best->second.events;
  if (!at_home) {  // may throw, too, so none is moved from
    const auto ended = std::ranges::partition(events, [&](const auto& event) { return !executor_->event_done(event); });
    events.erase(ended.begin(), ended.end());
  }
  for (const EventHandle& event : events) executor_->wait_event(stream, event);  // may throw: before any change
  if (at_home) events.clear();
  auto rest = free_.extract(best);  // nothing below asks for memory, so no piece is lost
  rest.key() = memory + wanted;
  rest.mapped().bytes -= wanted;
  if (rest.mapped().bytes > 0) free_.insert(std::move(rest));
  return memory;
}

void Arena::release(void* memory, std::size_t bytes, std::vector<EventHandle> events) {
  auto* const at = static_cast<std::byte*>(memory);
  const std::lock_guard lock(mutex_);
  const auto above = free_.lower_bound(at);
  if (at < begin_ || at >= end_ || bytes > static_cast<std::size_t>(end_ - at) ||
      (above != free_.end() && at + round_up(bytes) > above->first) ||
      (above != free_.begin() && std::prev(above)->first + std::prev(above)->second.bytes > at)) {
    fail<Error>("the arena's piece at {} is not handed out (given back twice?)", memory);
  }
  const auto piece = free_.emplace_hint(above, at, Piece{round_up(bytes), std::move(events)});
  merge_with_next(piece);
  if (piece != free_.begin()) merge_with_next(std::prev(piece));
}

/// If the next free piece begins where this one ends.
void Arena::merge_with_next(Pieces::iterator piece) {
  const auto next = std::next(piece);
  auto& [bytes, events] = piece->second;
  if (next == free_.end() || piece->first + bytes != next->first) return;
  events.insert(events.end(), next->second.events.begin(), next->second.events.end());  // may throw: before any change
  bytes += next->second.bytes;
  free_.erase(next);
}

void Arena::give_back(void* piece, std::size_t bytes, StreamHandle stream) noexcept {
  log::quietly([&] {
    // A graph that is being recorded would be the only one that could wait.
    if (!executor_->is_capturing(stream)) release(piece, bytes, {executor_->record_event(stream)});
  });
}

std::size_t Arena::largest_free() const {
  const std::lock_guard lock(mutex_);
  std::size_t largest = 0;
  for (const auto& [at, piece] : free_) largest = std::max(largest, piece.bytes);
  return largest;
}

}  // namespace deep_ep
