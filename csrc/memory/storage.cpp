#include "csrc/memory/storage.hpp"

#include <algorithm>
#include <exception>

#include "csrc/support/logging.hpp"

namespace deep_ep {

void StreamUses::add(Executor& executor, StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  // Asked each time: a stream known since before the recording began may be recording now.
  in_graph_ = in_graph_ || executor.is_capturing(stream);
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
}

std::vector<EventHandle> StreamUses::record(Executor& executor, const StreamHandle* skip) {
  const std::lock_guard lock(mutex_);
  std::vector<EventHandle> events;
  for (const StreamHandle stream : streams_) {
    if (skip == nullptr || stream != *skip) events.push_back(executor.record_event(stream));
  }
  return events;
}

bool StreamUses::in_graph(Executor& executor) {
  const std::lock_guard lock(mutex_);
  return in_graph_ || std::any_of(streams_.begin(), streams_.end(),
                                  [&](StreamHandle stream) { return executor.is_capturing(stream); });
}

ArenaStorage::ArenaStorage(std::shared_ptr<Arena> arena, const Arena::Block& block, StreamHandle stream)
    : arena_(std::move(arena)), block_(block), uses_(arena_->executor(), stream) {}

ArenaStorage::~ArenaStorage() {
  try {
    Executor& executor = arena_->executor();
    if (uses_.in_graph(executor)) {
      arena_->pin(block_);
      return;
    }
    arena_->release(block_, uses_.record(executor));
  } catch (const std::exception& error) {
    // At exit the driver may be gone. Not knowing when the memory is free again, nobody gets it.
    log::debug("a tensor's arena block was not given back: {}", error.what());
  }
}

void ArenaStorage::record_stream(StreamHandle stream) { uses_.add(arena_->executor(), stream); }

std::shared_ptr<ArenaStorage> ArenaStorage::allocate(const std::shared_ptr<Arena>& arena, std::size_t bytes,
                                                     StreamHandle stream) {
  Executor& executor = arena->executor();
  const auto allocation = arena->allocate(bytes, executor.is_capturing(stream));
  if (!allocation) return nullptr;
  try {
    for (const EventHandle& event : allocation->wait_for) executor.wait_event(stream, event);
    return std::make_shared<ArenaStorage>(arena, allocation->block, stream);
  } catch (...) {
    // Nothing used the block yet, so it is free when it was going to be.
    arena->release(allocation->block, allocation->wait_for);
    throw;
  }
}

PoolStorage::PoolStorage(std::shared_ptr<Executor> executor, std::size_t bytes, StreamHandle stream)
    : executor_(std::move(executor)),
      stream_(stream),
      memory_(executor_->allocate_async(bytes, stream)),
      uses_(*executor_, stream) {}

PoolStorage::~PoolStorage() {
  try {
    // What a graph may replay into stays allocated; the executor's pool goes on owning it.
    if (uses_.in_graph(*executor_)) return;
    for (const EventHandle& event : uses_.record(*executor_, &stream_)) executor_->wait_event(stream_, event);
    executor_->free_async(memory_, stream_);
  } catch (const std::exception& error) {
    log::debug("a tensor's memory was not given back: {}", error.what());
  }
}

void PoolStorage::record_stream(StreamHandle stream) { uses_.add(*executor_, stream); }

}  // namespace deep_ep
