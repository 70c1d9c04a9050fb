#include "csrc/memory/storage.hpp"

#include <algorithm>
#include <exception>

#include "csrc/support/logging.hpp"

namespace deep_ep {

void StreamStorage::record_stream(StreamHandle stream) {
  // Asked each time: a stream known since before the recording began may be recording now.
  record_stream(stream, home_->executor().is_capturing(stream));
}

void StreamStorage::record_stream(StreamHandle stream, bool recording) {
  const std::lock_guard lock(mutex_);
  in_graph_ = in_graph_ || recording;
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
}

bool StreamStorage::knows_stream(StreamHandle stream) const {
  const std::lock_guard lock(mutex_);
  return std::find(streams_.begin(), streams_.end(), stream) != streams_.end();
}

void StreamStorage::never_used() {
  const std::lock_guard lock(mutex_);
  in_graph_ = false;
  streams_.clear();
}

std::optional<std::vector<EventHandle>> StreamStorage::end_of_use(const StreamHandle* skip) {
  Executor& executor = home_->executor();
  const std::lock_guard lock(mutex_);
  if (in_graph_) return std::nullopt;
  for (const StreamHandle stream : streams_) {
    if (executor.is_capturing(stream)) return std::nullopt;
  }
  std::vector<EventHandle> events;
  for (const StreamHandle stream : streams_) {
    if (skip == nullptr || stream != *skip) events.push_back(executor.record_event(stream));
  }
  return events;
}

std::optional<std::vector<EventHandle>> StreamStorage::end_of_recorded_use() {
  Executor& executor = home_->executor();
  const std::lock_guard lock(mutex_);
  const StreamHandle at_home = home_->handle();
  std::vector<EventHandle> events;
  for (const StreamHandle stream : streams_) {
    if (!executor.is_capturing(stream)) {
      events.push_back(executor.record_event(stream));
    } else if (!executor.is_capturing(at_home)) {
      return std::nullopt;
    } else if (stream != at_home) {
      executor.wait_event(at_home, executor.record_event(stream));
    }
  }
  return events;
}

ArenaStorage::ArenaStorage(std::shared_ptr<Arena> arena, const Arena::Block& block, std::shared_ptr<HomeStream> home,
                           bool recording)
    : StreamStorage(std::move(home), recording), arena_(std::move(arena)), block_(block), for_graph_(recording) {}

ArenaStorage::~ArenaStorage() {
  try {
    // Whoever named the home stream itself did work there that HomeStream::idle does not know of, so it is not skipped.
    if (auto events = end_of_use()) {
      arena_->release(block_, *std::move(events));
    } else if (auto recorded = for_graph_ ? end_of_recorded_use() : std::nullopt) {
      arena_->release_to_graphs(block_, *std::move(recorded));
    } else {
      arena_->pin(block_);
    }
  } catch (const std::exception& error) {
    // At exit the driver may be gone. Nobody knows when the memory is free again, so nobody gets it.
    log::debug("a tensor's arena block was not given back: {}", error.what());
  }
}

std::shared_ptr<ArenaStorage> ArenaStorage::allocate(const std::shared_ptr<Arena>& arena, std::size_t bytes,
                                                     const std::shared_ptr<HomeStream>& home, bool recording) {
  if (recording && !home->idle()) return nullptr;
  const auto allocation = arena->allocate(bytes, recording);
  if (!allocation) return nullptr;
  try {
    for (const EventHandle& event : allocation->wait_for) home->executor().wait_event(home->handle(), event);
    return std::make_shared<ArenaStorage>(arena, allocation->block, home, recording);
  } catch (...) {
    // Nothing has used the block yet, so it is free as soon as it would have been, for those who might have it.
    if (recording) {
      arena->release_to_graphs(allocation->block, allocation->wait_for);
    } else {
      arena->release(allocation->block, allocation->wait_for);
    }
    throw;
  }
}

PoolStorage::PoolStorage(std::shared_ptr<MemoryCache> cache, std::size_t bytes, bool recording)
    : StreamStorage(cache->home(), recording), cache_(std::move(cache)) {
  block_ = recording ? MemoryCache::Block{home().executor().allocate_async(bytes, home().handle()), bytes}
                     : cache_->allocate(bytes);
}

PoolStorage::~PoolStorage() {
  try {
    const StreamHandle at_home = home().handle();
    // Memory that a graph may write to again stays allocated; the executor's pool still owns it.
    if (auto events = end_of_use(&at_home)) cache_->release(block_, *std::move(events));
  } catch (const std::exception& error) {
    log::debug("a tensor's memory was not given back: {}", error.what());
  }
}

}  // namespace deep_ep
