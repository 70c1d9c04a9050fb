// An executor and a heap on which nothing runs, for tests of what is enqueued and in which order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "csrc/memory/symmetric_heap.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::test {

// Streams are counters of enqueued work; a test says how far each has got. Nothing runs.
class FakeExecutor final : public Executor {
 public:
  struct Stream {
    std::uint64_t enqueued = 0;
    std::uint64_t done = 0;
    bool capturing = false;
    bool gone = false;
    std::vector<EventHandle> waited_for;
  };
  struct Event {
    Stream* stream;
    std::uint64_t position;
  };

  Device device() const override { return {}; }
  const LaunchPolicy& policy() const override { return policy_; }
  void* allocate(std::size_t bytes) override { return ::operator new(bytes); }
  void free(void* memory) noexcept override { ::operator delete(memory); }
  void* allocate_async(std::size_t bytes, StreamHandle) override {
    if (bytes > free_bytes) throw OutOfMemory("no memory left");
    ++live_async;
    ++allocated_async;
    return allocate(bytes);
  }
  void free_async(void* memory, StreamHandle stream) noexcept override {
    --live_async;
    freed_on = stream;
    free(memory);
  }
  std::size_t trim() override {
    free_bytes = std::max(free_bytes, free_bytes_trimmed);
    return ++trims, free_bytes_trimmed;
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
  bool is_capturing(StreamHandle stream) override { return of(stream).capturing; }
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
  static std::uint64_t position_of(const EventHandle& event) {
    return static_cast<const Event*>(event.get())->position;
  }

  int live_async = 0;
  int allocated_async = 0;
  std::size_t free_bytes = ~std::size_t{0};  ///< largest request that allocate_async grants
  std::size_t free_bytes_trimmed = 0;        ///< the same after a trim
  int trims = 0;
  StreamHandle freed_on = nullptr;

 private:
  LaunchPolicy policy_;
};

// Only addresses are handed out, so none of this memory needs to exist.
class FakeHeap final : public SymmetricHeap {
 public:
  explicit FakeHeap(std::size_t bytes) : bytes_(bytes) {}
  std::byte* local() const override { return reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40); }
  std::size_t bytes() const override { return bytes_; }
  HeapKind kind() const override { return HeapKind::posix_fd; }
  std::span<std::byte* const> peers() const override { return {}; }
  std::byte* const* device_peers() const override { return nullptr; }
  void unmap_peers() noexcept override {}
  void keep(Bootstrap& /*bootstrap*/) override {}
  void release_memory() noexcept override {}
  void resume(Bootstrap& /*bootstrap*/) override {}
  void admit(Bootstrap& /*bootstrap*/, const std::vector<bool>& /*is_new*/) override {}

 private:
  std::size_t bytes_;
};

}  // namespace deep_ep::test
