// An executor that acts as if streams were recorded into a CUDA graph.
#pragma once

#include <map>
#include <set>
#include <vector>

#include "tests/cluster/counting_executor.hpp"

namespace deep_ep::test {

/// While `recording`, says of every stream that it is being recorded. What is enqueued runs all the same. Memory that
/// is allocated meanwhile belongs to the recording.
class RecordingExecutor final : public CountingExecutor {
 public:
  using CountingExecutor::CountingExecutor;
  ~RecordingExecutor() override {
    const StreamHandle stream = create_stream();
    for (void* memory : recorded_) free_async(memory, stream);
    synchronize(stream);
    destroy_stream(stream);
  }

  bool recording = false;
  /// Streams that have joined the recording by waiting for another one, and for which no other has waited since. A
  /// recording that ends with any but the first stream here is invalid.
  std::set<StreamHandle> unjoined;

  bool is_capturing(StreamHandle stream) override { return recording || CountingExecutor::is_capturing(stream); }
  void* allocate_async(std::size_t bytes, StreamHandle stream) override {
    void* memory = CountingExecutor::allocate_async(bytes, stream);
    if (recording) recorded_.push_back(memory);
    return memory;
  }
  EventHandle record_event(StreamHandle stream) override {
    EventHandle event = CountingExecutor::record_event(stream);
    if (recording) recorded_on_[event] = stream;
    return event;
  }
  void wait_event(StreamHandle stream, const EventHandle& event) override {
    CountingExecutor::wait_event(stream, event);
    if (!recording) return;
    unjoined.insert(stream);
    if (const auto it = recorded_on_.find(event); it != recorded_on_.end()) unjoined.erase(it->second);
  }

 private:
  std::vector<void*> recorded_;
  std::map<EventHandle, StreamHandle> recorded_on_;
};

}  // namespace deep_ep::test
