// EventHandle of the Python interface.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "deep_ep/executor.hpp"

namespace deep_ep::bindings {

/// A point in a GPU's work. On the CPU there is nothing to wait for: calls end before they return.
class Event {
 public:
  /// All work that the calling thread's current stream holds.
  static Event of_current_stream();
  /// `results`: tensors that the event stands for. Who waits for it uses them.
  Event(std::shared_ptr<Executor> executor, EventHandle event, std::span<const Tensor* const> results);

  /// The stream that is current now waits; the host does not.
  void wait_on_current_stream() const;
  const EventHandle& event() const { return event_; }

 private:
  Event() = default;

  std::shared_ptr<Executor> executor_;
  EventHandle event_;
  std::vector<std::weak_ptr<Tensor::Storage>> results_;
};

}  // namespace deep_ep::bindings
