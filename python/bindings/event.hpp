// EventHandle of the Python interface.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "deep_ep/executor.hpp"

namespace deep_ep::bindings {

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

}  // namespace deep_ep::bindings
