// An executor that passes everything on to another one and counts what is asked of it. Each such request is one or two
// calls into the driver on a GPU, so their number stands for the host time of a Buffer call, on any machine. It can
// also refuse a request.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

#include "csrc/executor/backend.hpp"
#include "csrc/memory/symmetric_heap.hpp"

namespace deep_ep::test {

struct ExecutorCalls {
  int make_current = 0;
  int allocate_async = 0;
  int free_async = 0;
  int record_event = 0;
  int wait_event = 0;
  int event_done = 0;
  int is_capturing = 0;
  int fill = 0;
  int others = 0;  ///< calls that wait, or that belong to set-up

  int total() const {
    return make_current + allocate_async + free_async + record_event + wait_event + event_done + is_capturing + fill +
           others;
  }
  std::string describe() const {
    return std::to_string(total()) + " calls: current " + std::to_string(make_current) + ", allocate " +
           std::to_string(allocate_async) + ", free " + std::to_string(free_async) + ", record " +
           std::to_string(record_event) + ", wait " + std::to_string(wait_event) + ", query " +
           std::to_string(event_done) + ", capturing " + std::to_string(is_capturing) + ", fill " +
           std::to_string(fill) + ", others " + std::to_string(others);
  }
};

/// What a CountingExecutor refuses with.
struct Refused : std::runtime_error {
  Refused() : std::runtime_error("this request is refused") {}
};

/// Used by one thread at a time.
class CountingExecutor : public Backend {
 public:
  explicit CountingExecutor(const std::shared_ptr<Executor>& inner) : inner_(backend_of(inner)) {}

  ExecutorCalls calls;
  /// Counts down with every request, launches included; the one that makes it zero throws Refused. 0: none does.
  mutable int refused_request = 0;

  Device device() const override { return inner_->device(); }
  const LaunchPolicy& policy() const override { return inner_->policy(); }
  void* allocate(std::size_t bytes) override { return count(calls.others), inner_->allocate(bytes); }
  void free(void* memory) noexcept override { ++calls.others, inner_->free(memory); }
  void* allocate_async(std::size_t bytes, StreamHandle stream) override {
    return count(calls.allocate_async), inner_->allocate_async(bytes, stream);
  }
  void free_async(void* memory, StreamHandle stream) noexcept override {
    ++calls.free_async, inner_->free_async(memory, stream);
  }
  std::size_t trim() override { return count(calls.others), inner_->trim(); }
  void* allocate_pinned(std::size_t bytes) override { return count(calls.others), inner_->allocate_pinned(bytes); }
  void free_pinned(void* memory) noexcept override { ++calls.others, inner_->free_pinned(memory); }
  StreamHandle create_stream() override { return count(calls.others), inner_->create_stream(); }
  void destroy_stream(StreamHandle stream) noexcept override { ++calls.others, inner_->destroy_stream(stream); }
  EventHandle record_event(StreamHandle stream) override {
    return count(calls.record_event), inner_->record_event(stream);
  }
  void wait_event(StreamHandle stream, const EventHandle& event) override {
    count(calls.wait_event), inner_->wait_event(stream, event);
  }
  EventHandle adopt_event(void* native_event) override {
    return count(calls.others), inner_->adopt_event(native_event);
  }
  bool event_done(const EventHandle& event) override { return count(calls.event_done), inner_->event_done(event); }
  void synchronize_event(const EventHandle& event) override { count(calls.others), inner_->synchronize_event(event); }
  void synchronize(StreamHandle stream) override { count(calls.others), inner_->synchronize(stream); }
  bool is_capturing(StreamHandle stream) override { return count(calls.is_capturing), inner_->is_capturing(stream); }
  void copy(void* destination, const void* source, std::size_t bytes, StreamHandle stream) override {
    count(calls.others), inner_->copy(destination, source, bytes, stream);
  }
  void fill(void* destination, int byte, std::size_t bytes, StreamHandle stream) override {
    count(calls.fill), inner_->fill(destination, byte, bytes, stream);
  }
  double elapsed_seconds(const EventHandle& begin, const EventHandle& end) override {
    return inner_->elapsed_seconds(begin, end);
  }
  EventHandle record_timed_event(StreamHandle stream) override {
    return count(calls.others), inner_->record_timed_event(stream);
  }
  void make_current() override { count(calls.make_current), inner_->make_current(); }
  const KernelTable& kernels() const override { return may_refuse(), inner_->kernels(); }
  void load_kernels() const override { inner_->load_kernels(); }
  std::unique_ptr<SymmetricHeap> create_heap(Bootstrap& bootstrap, const HeapOptions& options) override {
    return inner_->create_heap(bootstrap, options);
  }

 private:
  void count(int& requests) const {
    ++requests;
    may_refuse();
  }
  void may_refuse() const {
    if (refused_request != 0 && --refused_request == 0) throw Refused();
  }

  std::shared_ptr<Backend> inner_;
};

}  // namespace deep_ep::test
