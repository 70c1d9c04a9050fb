#include "csrc/memory/storage.hpp"

#include <algorithm>
#include <bit>

#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {

StreamStorage::~StreamStorage() {
  log::quietly([this] { release_(end_of_use()); });  // else nobody knows when the memory is free again
}

void StreamStorage::record_stream(StreamHandle stream) {
  // Asked each time: a stream known since before the recording began may be recording now.
  record_stream(stream, home_->executor().capture_id(stream));
}

void StreamStorage::record_stream(StreamHandle stream, std::uint64_t graph) {
  const std::lock_guard lock(mutex_);
  in_other_graph_ = in_other_graph_ || (graph != 0 && graph != graph_);
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
}

bool StreamStorage::knows_stream(StreamHandle stream) const {
  {
    const std::lock_guard lock(mutex_);
    if (std::find(streams_.begin(), streams_.end(), stream) != streams_.end()) return true;
  }
  const std::uint64_t graph = home_->executor().capture_id(stream);
  return graph != 0 && graph != graph_;
}

std::optional<std::vector<EventHandle>> StreamStorage::end_of_use() const {
  Executor& executor = home_->executor();
  const auto elsewhere = [&](StreamHandle stream) { return executor.capture_id(stream) != graph_; };
  if (in_other_graph_ || std::ranges::any_of(streams_, elsewhere)) return {};
  std::vector<EventHandle> events;
  for (const StreamHandle stream : streams_) {
    events.push_back(to_home_ && stream == nullptr ? kDefaultStream : executor.record_event(stream));
  }
  return events;
}

std::shared_ptr<StreamStorage> allocate_in_arena(const std::shared_ptr<Arena>& arena, std::size_t bytes,
                                                 const std::shared_ptr<HomeStream>& home) {
  void* const memory = arena->take(bytes, home->handle(), true);
  if (memory == nullptr) return nullptr;
  return std::make_shared<StreamStorage>(memory, home, 0, false, [arena, memory, bytes](auto events) {
    if (events) arena->release(memory, bytes, *std::move(events));
  });
}

std::shared_ptr<StreamStorage> allocate_in_pool(const std::shared_ptr<MemoryCache>& cache, std::size_t bytes,
                                                std::uint64_t graph) {
  MemoryCache::Block block = cache->allocate(bytes, graph);
  void* const memory = block.memory;
  return std::make_shared<StreamStorage>(
      memory, cache->home(), graph, true,
      [cache, block = std::move(block)](auto events) { cache->release(block, std::move(events)); });
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
  log::quietly([this] {
    // A recording stream can neither wait for work outside of the graph nor free. Then the memory is lost.
    if (home_->executor().is_capturing(home_->handle())) return;
    for (const auto& [key, blocks] : unused_) {
      for (const Block& block : blocks) give_back(block);
    }
  });
}

MemoryCache::Block MemoryCache::allocate(std::size_t bytes, std::uint64_t graph) {
  Block found{.bytes = size_class(bytes), .graph = graph};
  {
    const std::lock_guard lock(mutex_);
    if (const auto same_size = unused_.find({graph, found.bytes});
        same_size != unused_.end() && !same_size->second.empty()) {
      Block& last = same_size->second.back();
      for (const EventHandle& event : last.events) home_->wait_for(event);  // may throw: before any change
      found.memory = last.memory;
      same_size->second.pop_back();
      if (graph == 0) unused_bytes_ -= found.bytes;
      return found;
    }
  }
  Executor& executor = home_->executor();
  // Memory goes back behind a wait, which a recording cannot make.
  if (graph == 0) give_back_unused(kMostUnused);
  try {
    found.memory = executor.allocate(found.bytes);
  } catch (const OutOfMemory&) {
    if (graph != 0) throw;
    give_back_unused();
    found.memory = executor.allocate(found.bytes);
  }
  return found;
}

void MemoryCache::release(Block block, std::optional<std::vector<EventHandle>> events) {
  const std::lock_guard lock(mutex_);
  if (!events) block.graph = kNoRecording;
  if (events) block.events = *std::move(events);
  if (block.graph == 0 && !kReuses) return give_back(block);
  if (block.graph == 0) unused_bytes_ += block.bytes;
  unused_[{block.graph, block.bytes}].push_back(std::move(block));
}

void MemoryCache::give_back(const Block& block) noexcept {
  log::quietly([&] {
    // Events of a recording are for the recording alone.
    for (const EventHandle& event : block.events) {
      if (block.graph == 0) home_->wait_for(event);
    }
    home_->executor().free_after(block.memory, home_->handle());
  });
}

void MemoryCache::give_back_unused(std::size_t most) {
  std::vector<Block> gone;
  {
    const std::lock_guard lock(mutex_);
    for (auto size = unused_.lower_bound({1, 0}); size != unused_.begin() && unused_bytes_ > most;) {
      std::vector<Block>& blocks = (--size)->second;
      for (; !blocks.empty() && unused_bytes_ > most; blocks.pop_back()) {
        unused_bytes_ -= blocks.back().bytes;
        gone.push_back(std::move(blocks.back()));
      }
    }
  }
  for (const Block& block : gone) give_back(block);
}

}  // namespace deep_ep
