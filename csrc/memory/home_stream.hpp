// The order in which a buffer's memory is handed out: that of its calls. They run on the communication stream or on the
// callers' streams, each after the one before it, as if all were on one stream.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <utility>

#include "deep_ep/executor.hpp"

namespace deep_ep {

/// Calls use the memory first, and they are in order: what earlier calls did with a piece of memory needs no event.
/// Other work of streams does. Thread-safe.
class HomeStream {
 public:
  HomeStream(std::shared_ptr<Executor> executor, StreamHandle stream)
      : executor_(std::move(executor)), stream_(stream) {}

  Executor& executor() const { return *executor_; }
  /// The real stream of the call under way; between calls, the communication stream.
  StreamHandle handle() const { return stream_.load(std::memory_order_relaxed); }
  void works_on(StreamHandle stream) { stream_.store(stream, std::memory_order_relaxed); }

  /// From here on, work may be enqueued that no event known to this object covers ...
  void work_begins() {
    const std::lock_guard lock(mutex_);
    open_ = true;
  }
  /// ... until here. Work that is recorded into a graph does not count: it does not run now.
  void work_ends(EventHandle behind) {
    const std::lock_guard lock(mutex_);
    latest_ = std::move(behind);
    latest_on_ = handle();
    open_ = false;
  }
  /// Behind all work that has ended; null when there was none. The next work has to wait for it.
  EventHandle latest() {
    const std::lock_guard lock(mutex_);
    return latest_;
  }
  /// The same; null, too, when the latest work was on `stream` itself, whose order covers it.
  EventHandle latest_unless_on(StreamHandle stream) {
    const std::lock_guard lock(mutex_);
    return latest_on_ == stream ? nullptr : latest_;
  }
  /// True when all work that was begun is known to have ended. Needed for graphs: their replays do not wait for the
  /// stream, so they may only use memory that it has finished with.
  bool idle() {
    const std::lock_guard lock(mutex_);
    return !open_ && (latest_ == nullptr || executor_->event_done(latest_));
  }

 private:
  std::shared_ptr<Executor> executor_;
  std::atomic<StreamHandle> stream_;
  std::mutex mutex_;
  bool open_ = false;
  EventHandle latest_;
  StreamHandle latest_on_ = nullptr;
};

}  // namespace deep_ep
