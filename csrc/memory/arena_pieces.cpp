#include "csrc/memory/arena_pieces.hpp"

#include <exception>
#include <iterator>

#include "csrc/support/logging.hpp"

namespace deep_ep {

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
