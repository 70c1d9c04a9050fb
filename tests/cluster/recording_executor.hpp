// An executor that acts as if streams were recorded into a CUDA graph.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "tests/cluster/cluster.hpp"
#include "tests/cluster/launches_executor.hpp"

namespace deep_ep::test {

/// While `recording`, says of every stream that it is being recorded. What is enqueued runs all the same, and kernels
/// and copies run again with replay().
class RecordingExecutor final : public LaunchesExecutor {
 public:
  using LaunchesExecutor::LaunchesExecutor;

  /// Each time that it becomes true another graph is recorded.
  class Recording {
   public:
    Recording& operator=(bool on) {
      graphs_ += on && !on_;
      on_ = on;
      return *this;
    }
    operator bool() const { return on_; }  // NOLINT(google-explicit-constructor)
    std::uint64_t graph() const { return on_ ? graphs_ : 0; }

   private:
    bool on_ = false;
    std::uint64_t graphs_ = 0;
  };
  Recording recording;
  /// Streams that have joined the recording by waiting for another one, and for which no other has waited since. A
  /// recording that ends with any but the first stream here is invalid.
  std::set<StreamHandle> unjoined;

  /// Nothing else may be under way. Kernels and copies are on the streams that they were recorded on, and as streams
  /// waited for each other then, they do again.
  void replay() {
    for (const auto& work : work_) work();
    replayed_.clear();
  }

  std::uint64_t capture_id(StreamHandle stream) override {
    return recording ? recording.graph() : CountingExecutor::capture_id(stream);
  }
  void copy(void* destination, const void* source, std::size_t bytes, StreamHandle stream) override {
    CountingExecutor::copy(destination, source, bytes, stream);
    if (recording) work_.push_back([=, this] { CountingExecutor::copy(destination, source, bytes, stream); });
  }
  void fill(void* destination, int byte, std::size_t bytes, StreamHandle stream) override {
    CountingExecutor::fill(destination, byte, bytes, stream);
    if (recording) work_.push_back([=, this] { CountingExecutor::fill(destination, byte, bytes, stream); });
  }
  EventHandle record_event(StreamHandle stream) override {
    EventHandle event = CountingExecutor::record_event(stream);
    if (!recording) return event;
    recorded_on_[event] = stream;
    work_.push_back([=, this] { replayed_[event] = CountingExecutor::record_event(stream); });
    return event;
  }
  void wait_event(StreamHandle stream, const EventHandle& event) override {
    CountingExecutor::wait_event(stream, event);
    if (!recording) return;
    unjoined.insert(stream);
    const auto it = recorded_on_.find(event);
    if (it == recorded_on_.end()) return;
    unjoined.erase(it->second);
    work_.push_back([=, this] { CountingExecutor::wait_event(stream, replayed_.at(event)); });
  }

 private:
  void launch(host_machine::KernelLaunch kernel, StreamHandle stream) override {
    if (recording) work_.emplace_back([=] { host_machine::enqueue(kernel, stream); });
    host_machine::enqueue(std::move(kernel), stream);
  }

  std::vector<std::function<void()>> work_;
  std::map<EventHandle, StreamHandle> recorded_on_;
  std::map<EventHandle, EventHandle> replayed_;  ///< for events of the recording, those of the replay
};

/// Waits for all that the rank has enqueued.
inline void settle(const Rank& rank, const Buffer& buffer) {
  for (const StreamHandle stream : {rank.stream(), buffer.comm_stream()}) rank.executor()->synchronize(stream);
}

/// Records what `calls` enqueues. All streams must have come back to the rank's.
template <class Calls>
void record(const Rank& rank, RecordingExecutor& executor, const Calls& calls) {
  executor.recording = true;
  calls();
  executor.recording = false;
  executor.unjoined.erase(rank.stream());
  require(executor.unjoined.empty(), "a stream has not come back to the recording");
}

}  // namespace deep_ep::test
