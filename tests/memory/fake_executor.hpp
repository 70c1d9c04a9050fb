// An executor on which nothing runs, for tests of what is enqueued and in which order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <vector>

#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::test {

// Streams are counters of enqueued work; a test says how far each has got. Nothing runs.
class FakeExecutor final : public Executor {
 public:
  struct Stream {
    std::uint64_t enqueued = 0;
    std::uint64_t done = 0;
    std::uint64_t capturing = 0;  ///< the number of the recording
    bool gone = false;
    std::vector<EventHandle> waited_for;
  };
  struct Event {
    Stream* stream;
    std::uint64_t position;
  };

  Device device() const override { return {}; }
  const LaunchPolicy& policy() const override { return policy_; }
  void* allocate(std::size_t bytes) override {
    if (live_bytes + bytes > most_bytes) throw OutOfMemory("no memory left");
    ++allocated;
    void* memory = ::operator new(bytes);
    live_bytes += sizes_[memory] = bytes;
    return memory;
  }
  void free(void* memory) noexcept override {
    const auto found = sizes_.find(memory);
    live_bytes -= found->second;
    sizes_.erase(found);
    ::operator delete(memory);
  }
  void free_after(void* memory, StreamHandle stream) noexcept override {
    freed_on = stream;
    free(memory);
  }
  void* allocate_pinned(std::size_t bytes) override { return allocate(bytes); }
  void free_pinned(void* memory) noexcept override { free(memory); }
  StreamHandle create_stream() override { return new Stream; }
  void destroy_stream(StreamHandle stream) noexcept override { delete &of(stream); }
  EventHandle record_event(StreamHandle stream) override {
    if (of(stream).gone) throw SystemError("the driver is gone");
    return std::make_shared<Event>(Event{&of(stream), ++of(stream).enqueued});
  }
  void wait_event(StreamHandle stream, const EventHandle& event) override { of(stream).waited_for.push_back(event); }
  bool event_done(const EventHandle& event) override {
    const auto& e = *static_cast<const Event*>(event.get());
    return e.stream->done >= e.position;
  }
  void synchronize_event(const EventHandle& event) override {
    const auto& e = *static_cast<const Event*>(event.get());
    e.stream->done = std::max(e.stream->done, e.position);
  }
  void synchronize(StreamHandle stream) override { of(stream).done = of(stream).enqueued; }
  std::uint64_t capture_id(StreamHandle stream) override { return of(stream).capturing; }
  void copy(void*, const void*, std::size_t, StreamHandle) override {}
  void fill(void*, int, std::size_t, StreamHandle) override {}
  double elapsed_seconds(const EventHandle&, const EventHandle&) override { return 0; }
  EventHandle record_timed_event(StreamHandle stream) override { return record_event(stream); }
  void make_current() override {}

  static Stream& of(StreamHandle stream) {
    static Stream the_default;
    return stream == nullptr ? the_default : *static_cast<Stream*>(stream);
  }
  static Stream* stream_of(const EventHandle& event) { return static_cast<const Event*>(event.get())->stream; }

  int allocated = 0;                                          ///< so often
  std::size_t live_bytes = 0;                                 ///< allocated and not freed
  std::size_t most_bytes = std::numeric_limits<long>::max();  ///< that may be
  StreamHandle freed_on = nullptr;

  std::size_t live() const { return sizes_.size(); }

 private:
  LaunchPolicy policy_;
  std::map<void*, std::size_t> sizes_;  ///< of memory that is allocated
};

/// For an arena: only addresses are handed out, so none of this memory needs to exist.
inline std::shared_ptr<std::byte> fake_memory() {
  return {std::shared_ptr<void>(), reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40)};
}

}  // namespace deep_ep::test
