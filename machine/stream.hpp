// Streams and events of the host executor: work in order, done by the pool, asynchronous to the thread that enqueues
// it.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "csrc/support/home_process.hpp"
#include "kernels/primitives/host/launch.hpp"
#include "machine/kernel.hpp"
#include "machine/worker_pool.hpp"

namespace deep_ep::host_machine {

/// A point in a stream. Completed once.
class HostEvent {
 public:
  using Clock = std::chrono::steady_clock;

  void complete();
  bool done() { return wait({}); }
  bool wait(Clock::duration most = std::chrono::years(1));  ///< false: not yet
  /// Calls `then` when the event completes. False, without a call, if it has completed already.
  bool on_completion(std::function<void()> then);

  // Written before the event completes.
  std::string failure;     ///< of the stream before this point
  Clock::time_point time;  ///< of its completion
  char sync_point = 0;     ///< for ThreadSanitizer

 private:
  std::mutex mutex_;
  std::condition_variable completed_;
  bool done_ = false;
  std::vector<std::function<void()>> then_;
};

class HostStream final : public std::enable_shared_from_this<HostStream> {
 public:
  /// `owner` is the executor. `seed` 0: kernels run in fixed order; otherwise each launch has its own
  /// schedule, derived from it.
  HostStream(const void* owner, std::uint64_t seed, std::size_t max_shared_bytes);
  ~HostStream();

  void launch(KernelLaunch kernel);
  /// Data movement and the like: not done once the stream has failed. `always`: in any case, to give memory back.
  void enqueue(std::function<void()> work, bool always = false);
  std::shared_ptr<HostEvent> record();
  /// A failure before the event is then one of this stream, too: as on a GPU, no later work takes what is missing.
  void wait(std::shared_ptr<HostEvent> event);
  /// Returns when all that was enqueued is done. Throws what failed since the last time; a stream that waits for an
  /// event behind the failure has it, too.
  void synchronize();
  /// Are we in a child forked since? It has no workers: what is enqueued there throws.
  bool inherited() const { return home_.left(); }
  /// Throws there.
  void require_home() const;

 private:
  friend class Kernel;

  struct Operation {
    /// Returns false if it is not done yet: then resume() or pump() is called when it is.
    std::function<bool()> step;
    char sync_point = 0;  ///< for ThreadSanitizer: from the enqueuing thread to the stream
  };

  void add(std::function<bool()> step);
  void resume();
  void pump();
  bool start(KernelLaunch launch);
  void fail_with(const std::string& text);  ///< the first one counts; none is empty
  std::string failure();
  bool failed() { return !failure().empty(); }

  const HomeProcess home_;
  WorkerPool& pool_ = WorkerPool::instance();
  const void* const owner_;
  const std::uint64_t seed_;
  const std::size_t max_shared_bytes_;
  void* const tsan_context_;  ///< copies are done in it
  std::uint64_t launches_ = 0;

  std::mutex mutex_;
  std::deque<Operation> queue_;
  bool busy_ = false;  ///< a thread runs the queue, or will
  std::string failure_;
};

}  // namespace deep_ep::host_machine
