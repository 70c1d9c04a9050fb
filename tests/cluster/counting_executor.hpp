// An executor that passes everything on to another one and counts what is asked of it. Each such request is one or two
// calls into the driver on a GPU, so their number stands for the host time of a Buffer call, on any machine. It can
// also refuse a request.
#pragma once

#include <atomic>
#include <memory>
#include <stdexcept>

#include "csrc/executor/backend.hpp"
#include "csrc/memory/symmetric_heap.hpp"

namespace deep_ep::test {

struct ExecutorCalls {
  int all = 0, record_event = 0, wait_event = 0;
};

/// What a CountingExecutor refuses with.
struct Refused : std::runtime_error {
  Refused() : std::runtime_error("this request is refused") {}
};

/// Used by one thread at a time, but for the thread of a simulated NIC.
class CountingExecutor : public Backend {
 public:
  explicit CountingExecutor(const std::shared_ptr<Executor>& inner) : inner_(backend_of(inner)) {}

  ExecutorCalls calls;
  /// Counts down with every request, launches included; the one that makes it zero throws Refused. 0: none does.
  mutable int refused_request = 0;

  Device device() const override { return inner_->device(); }
  const LaunchPolicy& policy() const override { return inner_->policy(); }
  void* allocate(std::size_t bytes) override { return count(), inner_->allocate(bytes); }
  void free(void* memory) noexcept override { add(calls.all), inner_->free(memory); }
  void free_after(void* memory, StreamHandle stream) noexcept override {
    add(calls.all), inner_->free_after(memory, stream);
  }
  void* allocate_pinned(std::size_t bytes) override { return count(), inner_->allocate_pinned(bytes); }
  void free_pinned(void* memory) noexcept override { add(calls.all), inner_->free_pinned(memory); }
  StreamHandle create_stream() override { return count(), inner_->create_stream(); }
  void destroy_stream(StreamHandle stream) noexcept override { add(calls.all), inner_->destroy_stream(stream); }
  EventHandle record_event(StreamHandle stream) override {
    return add(calls.record_event), count(), inner_->record_event(stream);
  }
  void wait_event(StreamHandle stream, const EventHandle& event) override {
    add(calls.wait_event), count(), inner_->wait_event(stream, event);
  }
  bool event_done(const EventHandle& event) override { return count(), inner_->event_done(event); }
  void synchronize_event(const EventHandle& event) override { count(), inner_->synchronize_event(event); }
  void synchronize(StreamHandle stream) override { count(), inner_->synchronize(stream); }
  std::uint64_t capture_id(StreamHandle stream) override { return count(), inner_->capture_id(stream); }
  void copy(void* destination, const void* source, std::size_t bytes, StreamHandle stream) override {
    count(), inner_->copy(destination, source, bytes, stream);
  }
  void fill(void* destination, int byte, std::size_t bytes, StreamHandle stream) override {
    count(), inner_->fill(destination, byte, bytes, stream);
  }
  double elapsed_seconds(const EventHandle& begin, const EventHandle& end) override {
    return inner_->elapsed_seconds(begin, end);
  }
  EventHandle record_timed_event(StreamHandle stream) override { return count(), inner_->record_timed_event(stream); }
  void make_current() override { count(), inner_->make_current(); }
  const KernelTable& kernels() const override { return may_refuse(), inner_->kernels(); }
  void load_kernels() const override { inner_->load_kernels(); }
  DeviceIdentity identity() const override { return inner_->identity(); }
  bool adds_atomically_to(const DeviceIdentity& device) const override { return inner_->adds_atomically_to(device); }
  std::unique_ptr<SymmetricHeap> create_heap(Bootstrap& bootstrap, const HeapBytes& bytes_for) override {
    return inner_->create_heap(bootstrap, bytes_for);
  }

 private:
  static void add(int& number) { std::atomic_ref(number).fetch_add(1, std::memory_order_relaxed); }
  void count() {
    add(calls.all);
    may_refuse();
  }
  void may_refuse() const {
    if (refused_request != 0 && --refused_request == 0) throw Refused();
  }

  std::shared_ptr<Backend> inner_;
};

}  // namespace deep_ep::test
