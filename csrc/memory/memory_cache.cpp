#include "csrc/memory/memory_cache.hpp"

#include <algorithm>
#include <bit>
#include <exception>
#include <optional>
#include <utility>

#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

constexpr std::size_t kSmallest = 512;

}  // namespace

std::size_t MemoryCache::size_class(std::size_t bytes) {
  if (bytes <= kSmallest) return kSmallest;
  // Eight steps from each power of two to the next. Sizes beyond all limits are left for the executor to refuse.
  const std::size_t step = std::max(kSmallest, std::bit_floor(bytes - 1) / 8);
  const std::size_t rounded = (bytes + step - 1) / step * step;
  return rounded < bytes ? bytes : rounded;
}

MemoryCache::~MemoryCache() {
  try {
    // A recording stream can neither wait for work outside of the graph nor free. Then the executor keeps the memory.
    if (!home_->executor().is_capturing(home_->handle())) give_back_all();
  } catch (const std::exception& error) {
    log::debug("memory was not given back: {}", error.what());
  }
}

MemoryCache::Block MemoryCache::allocate(std::size_t bytes) {
  const std::size_t wanted = size_class(bytes);
  std::optional<Unused> found;
  bool too_much = false;
  {
    const std::lock_guard lock(mutex_);
    if (const auto same_size = unused_.find(wanted); same_size != unused_.end() && !same_size->second.empty()) {
      found = std::move(same_size->second.back());
      same_size->second.pop_back();
      unused_bytes_ -= wanted;
    }
    too_much = unused_bytes_ > kMostUnused;
  }
  if (!found) {
    if (too_much) give_back_all();
    return {.memory = take(wanted), .bytes = wanted};
  }
  try {
    for (const EventHandle& event : found->events) home_->executor().wait_event(home_->handle(), event);
  } catch (...) {
    release(found->block, std::move(found->events));
    throw;
  }
  return found->block;
}

void* MemoryCache::take(std::size_t bytes) {
  Executor& executor = home_->executor();
  try {
    return executor.allocate_async(bytes, home_->handle());
  } catch (const OutOfMemory&) {
    // The executor has trimmed its pool, but not of what is ours, nor of what work under way uses.
    give_back_all();
    executor.synchronize(home_->handle());
    executor.trim();
    return executor.allocate_async(bytes, home_->handle());
  }
}

void MemoryCache::release(const Block& block, std::vector<EventHandle> events) {
  Unused unused{.block = block, .events = std::move(events)};
  if (!kReuses) {
    give_back(unused);
    return;
  }
  const std::lock_guard lock(mutex_);
  unused_[block.bytes].push_back(std::move(unused));
  unused_bytes_ += block.bytes;
}

std::size_t MemoryCache::unused_bytes() const {
  const std::lock_guard lock(mutex_);
  return unused_bytes_;
}

void MemoryCache::give_back(const Unused& unused) {
  for (const EventHandle& event : unused.events) home_->executor().wait_event(home_->handle(), event);
  home_->executor().free_async(unused.block.memory, home_->handle());
}

void MemoryCache::give_back_all() {
  std::map<std::size_t, std::vector<Unused>> all;
  {
    const std::lock_guard lock(mutex_);
    all.swap(unused_);
    unused_bytes_ = 0;
  }
  for (const auto& [bytes, blocks] : all) {
    for (const Unused& unused : blocks) give_back(unused);
  }
}

}  // namespace deep_ep
