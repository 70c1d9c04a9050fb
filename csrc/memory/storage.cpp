#include "csrc/memory/storage.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <exception>
#include <utility>

#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

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

std::optional<std::vector<EventHandle>> StreamStorage::end_of_use(bool at_home) {
  Executor& executor = home_->executor();
  const std::lock_guard lock(mutex_);
  const auto records = [&](StreamHandle stream) { return executor.is_capturing(stream); };
  if (in_graph_ || std::ranges::any_of(streams_, records)) return std::nullopt;
  std::vector<EventHandle> events;
  for (const StreamHandle stream : streams_) {
    if (at_home && stream == nullptr) {
      events.push_back(kDefaultStream);
    } else if (!at_home || stream != home_->handle()) {
      events.push_back(executor.record_event(stream));
    }
  }
  return events;
}

StreamStorage::~StreamStorage() {
  try {
    give_back_(*this);
  } catch (const std::exception& error) {
    // At exit the driver may be gone. Nobody knows when the memory is free again, so nobody gets it.
    log::debug("a tensor's memory was not given back: {}", error.what());
  }
}

std::shared_ptr<StreamStorage> allocate_in_arena(const std::shared_ptr<Arena>& arena, std::size_t bytes,
                                                 const std::shared_ptr<HomeStream>& home) {
  void* const piece = arena->take(bytes, home->handle());
  if (piece == nullptr) return nullptr;
  return std::make_shared<StreamStorage>(home, piece, false, [arena, piece](StreamStorage& storage) {
    // A caller may have named the home stream, for work that HomeStream does not know of: that needs an event, too.
    arena->release(piece, storage.end_of_use(false));
  });
}

std::size_t MemoryCache::size_class(std::size_t bytes) {
  constexpr std::size_t kSmallest = 512;
  if (bytes <= kSmallest) return kSmallest;
  // Eight steps from each power of two to the next. Sizes beyond all limits are left for the executor to refuse.
  const std::size_t step = std::max(kSmallest, std::bit_floor(bytes - 1) / 8);
  const std::size_t rounded = (bytes + step - 1) / step * step;
  return rounded < bytes ? bytes : rounded;
}

MemoryCache::~MemoryCache() {
  try {
    // A recording stream can neither wait for work outside of the graph nor free. Then the memory is lost.
    if (home_->executor().is_capturing(home_->handle())) return;
    give_back_unused();
    for (void* memory : of_graphs_) home_->executor().free_after(memory, home_->handle());
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
    if (too_much) give_back_unused(kMostUnused);
    return {.memory = take(wanted), .bytes = wanted};
  }
  try {
    for (const EventHandle& event : found->events) home_->wait_for(event);
  } catch (...) {
    release(found->block, std::move(found->events));
    throw;
  }
  return found->block;
}

void* MemoryCache::take(std::size_t bytes) {
  Executor& executor = home_->executor();
  try {
    return executor.allocate(bytes);
  } catch (const OutOfMemory&) {
    give_back_unused();
    return executor.allocate(bytes);
  }
}

void MemoryCache::release(const Block& block, std::optional<std::vector<EventHandle>> events) {
  const std::lock_guard lock(mutex_);
  if (!events) return of_graphs_.push_back(block.memory);
  Unused unused{.block = block, .events = *std::move(events)};
  if (!kReuses) return give_back(unused);
  unused_[block.bytes].push_back(std::move(unused));
  unused_bytes_ += block.bytes;
}

std::size_t MemoryCache::unused_bytes() const {
  const std::lock_guard lock(mutex_);
  return unused_bytes_;
}

void MemoryCache::give_back(const Unused& unused) {
  for (const EventHandle& event : unused.events) home_->wait_for(event);
  home_->executor().free_after(unused.block.memory, home_->handle());
}

void MemoryCache::give_back_unused(std::size_t most) {
  std::vector<Unused> gone;
  {
    const std::lock_guard lock(mutex_);
    for (auto size = unused_.rbegin(); size != unused_.rend(); ++size) {
      for (; !size->second.empty() && unused_bytes_ > most; size->second.pop_back()) {
        unused_bytes_ -= size->first;
        gone.push_back(std::move(size->second.back()));
      }
    }
  }
  for (const Unused& unused : gone) give_back(unused);
}

std::shared_ptr<StreamStorage> allocate_in_pool(const std::shared_ptr<MemoryCache>& cache, std::size_t bytes,
                                                bool recording) {
  const std::shared_ptr<HomeStream>& home = cache->home();
  const MemoryCache::Block block = recording ? cache->allocate_for_graph(bytes) : cache->allocate(bytes);
  return std::make_shared<StreamStorage>(home, block.memory, recording, [cache, block](StreamStorage& storage) {
    cache->release(block, storage.end_of_use(true));
  });
}

ResultAllocator::Memory ProgramMemory::allocate(std::size_t bytes, StreamHandle stream) {
  constexpr std::uintptr_t kAlignment = 256;
  give_back_what_has_ended();
  ResultAllocator::Memory memory;
  try {
    memory = allocator_->allocate(bytes, executor_->device(), stream);
  } catch (const OutOfMemory&) {
    // A host that is calls ahead of the device has dropped memory that these calls still use.
    if (executor_->is_capturing(stream) || !wait_for_kept()) throw;
    memory = allocator_->allocate(bytes, executor_->device(), stream);
  }
  if (memory.data == nullptr || reinterpret_cast<std::uintptr_t>(memory.data) % kAlignment != 0) {
    fail<InvalidArgument>("result_allocator returned address {} for {}, allowed: multiples of {}, not null",
                          memory.data, format_bytes(bytes), kAlignment);
  }
  return memory;
}

ProgramMemory::~ProgramMemory() {
  try {
    for (const Kept& kept : kept_) {
      for (const EventHandle& event : kept.until) executor_->synchronize_event(event);
    }
  } catch (const std::exception& error) {
    log::debug("memory was given back without waiting: {}", error.what());
  }
}

void ProgramMemory::release(ResultAllocator::Memory memory, const Use& use) {
  if (use.of_graph) return release_recorded(use);
  Kept kept{.memory = std::move(memory), .until = {}};
  if (use.calls != nullptr) kept.until.push_back(use.calls);
  bool for_ever = false;
  for (const StreamHandle user : use.others) {
    if (user == use.stream) continue;
    for_ever = for_ever || executor_->is_capturing(user);
    if (!for_ever) kept.until.push_back(executor_->record_event(user));
  }
  if (for_ever) {
    kept.until.clear();
  } else if (std::ranges::all_of(kept.until, [&](const EventHandle& event) { return executor_->event_done(event); })) {
    return;  // the owner goes
  }
  const std::lock_guard lock(mutex_);
  kept_.push_back(std::move(kept));
}

/// While the recording goes on, what is recorded next comes behind what the others have recorded. Afterwards the memory
/// is the graph's.
void ProgramMemory::release_recorded(const Use& use) {
  if (!executor_->is_capturing(use.stream)) return;
  for (const StreamHandle user : use.others) {
    if (user == use.stream || !executor_->is_capturing(user)) continue;
    executor_->wait_event(use.stream, executor_->record_event(user));
  }
}

bool ProgramMemory::wait_for_kept() {
  std::vector<EventHandle> events;
  {
    const std::lock_guard lock(mutex_);
    for (const Kept& kept : kept_) events.insert(events.end(), kept.until.begin(), kept.until.end());
  }
  for (const EventHandle& event : events) executor_->synchronize_event(event);
  give_back_what_has_ended();
  return !events.empty();
}

void ProgramMemory::give_back_what_has_ended() {
  std::vector<Kept> ended;  // goes back without the lock
  const std::lock_guard lock(mutex_);
  for (auto it = kept_.begin(); it != kept_.end();) {
    const bool over = !it->until.empty() && std::all_of(it->until.begin(), it->until.end(), [&](const auto& event) {
      return executor_->event_done(event);
    });
    if (!over) {
      ++it;
      continue;
    }
    ended.push_back(std::move(*it));
    it = kept_.erase(it);
  }
}

std::shared_ptr<StreamStorage> allocate_of_program(const std::shared_ptr<ProgramMemory>& memory, std::size_t bytes,
                                                   StreamHandle stream, const std::shared_ptr<HomeStream>& home,
                                                   bool recording) {
  ResultAllocator::Memory piece = memory->allocate(bytes, stream);
  const auto give_back = [memory, stream, recording, piece](StreamStorage& gone) mutable {
    // Later calls use it, too: as a handle, or as their input. Nobody names the stream that they run on.
    memory->release(std::move(piece), {stream, gone.users(), gone.home().latest_unless_on(stream), recording});
  };
  auto storage = std::make_shared<StreamStorage>(home, piece.data, recording, give_back);
  if (home->handle() == stream) return storage;
  // Behind what the allocator has enqueued there meanwhile.
  home->executor().wait_event(home->handle(), home->executor().record_event(stream));
  storage->record_stream(home->handle(), recording);
  return storage;
}

}  // namespace deep_ep
