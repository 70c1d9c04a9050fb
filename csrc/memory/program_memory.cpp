#include "csrc/memory/program_memory.hpp"

#include <algorithm>
#include <cstdint>
#include <exception>
#include <utility>

#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {

ResultAllocator::Memory ProgramMemory::allocate(std::size_t bytes, StreamHandle stream) {
  constexpr std::uintptr_t kAlignment = 256;
  give_back_what_has_ended();
  ResultAllocator::Memory memory = allocator_->allocate(bytes, executor_->device(), stream);
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

ProgramStorage::ProgramStorage(std::shared_ptr<ProgramMemory> memory, std::size_t bytes, StreamHandle stream,
                               const std::shared_ptr<HomeStream>& home, bool recording)
    : StreamStorage(home, recording), memory_(std::move(memory)), stream_(stream), of_graph_(recording) {
  block_ = memory_->allocate(bytes, stream_);
  if (home->handle() == stream_) return;
  // Behind what the allocator has enqueued there meanwhile.
  home->executor().wait_event(home->handle(), home->executor().record_event(stream_));
  record_stream(home->handle(), recording);
}

ProgramStorage::~ProgramStorage() {
  try {
    // Later calls use it, too: as a handle, or as their input. Nobody names the stream that they run on.
    memory_->release(std::move(block_), {stream_, users(), home().latest_unless_on(stream_), of_graph_});
  } catch (const std::exception& error) {
    // At exit the driver may be gone, and the memory goes with it.
    log::debug("a tensor's memory was given back without waiting: {}", error.what());
  }
}

}  // namespace deep_ep
