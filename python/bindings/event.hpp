// EventHandle and ReceiveHook of the Python interface, and the executors that events are of.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "deep_ep/executor.hpp"

namespace deep_ep::bindings {

/// One executor per GPU for the whole process, as events cross from one buffer to another: made at the first call for a
/// device, never destroyed: at interpreter exit other objects may still need it.
std::shared_ptr<Executor> gpu_executor(int device);

/// A point in a GPU's work. On the CPU there is nothing to wait for: calls end before they return.
class Event {
 public:
  /// All work that the calling thread's current stream holds.
  static Event of_current_stream();
  /// `results`: tensors that the event stands for, or nothing. A stream that waits for it uses them.
  template <class... Results>
  Event(std::shared_ptr<Executor> executor, EventHandle event, const Results&... results)
      : executor_(std::move(executor)), event_(std::move(event)) {
    (stand_for(results), ...);
  }

  /// The stream that is current now waits; the host does not.
  void wait_on_current_stream() const;
  const EventHandle& event() const { return event_; }

 private:
  Event() = default;
  void stand_for(const Tensor& result) { results_.emplace_back(result.storage()); }
  void stand_for(const std::optional<Tensor>& result) {
    if (result) stand_for(*result);
  }

  std::shared_ptr<Executor> executor_;
  EventHandle event_;
  std::vector<std::weak_ptr<Tensor::Storage>> results_;
};

/// The hook of a low-latency call with return_recv_hook: enqueues the receive part when called; a second call does
/// nothing. The buffer keeps all that this part needs, also when the hook is dropped.
class ReceiveHook {
 public:
  /// `receive` is called with the GIL.
  explicit ReceiveHook(std::function<void()> receive) : receive_(std::move(receive)) {}
  void call() {
    if (!receive_) return;
    const std::function<void()> receive = receive_;  // the program may drop the hook meanwhile
    receive();
    receive_ = nullptr;  // only now: a hook that failed may come again
  }

 private:
  std::function<void()> receive_;
};

}  // namespace deep_ep::bindings
