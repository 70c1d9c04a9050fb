#include "machine/worker_pool.hpp"

#include <sched.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "csrc/support/backoff.hpp"
#include "csrc/support/environment.hpp"
#include "machine/block.hpp"

namespace deep_ep::host_machine {

namespace {

constexpr int kPatientRounds = 64;  ///< rounds of mere polling before the worker sleeps

int chosen_size() {
  if (const std::uint64_t asked = environment::unsigned_integer("DEEP_EP_HOST_THREADS"); asked > 0) {
    return static_cast<int>(std::min<std::uint64_t>(asked, 1024));
  }
  const int processors = std::max(2, static_cast<int>(std::thread::hardware_concurrency()));
  // Each worker keeps fibers for each rank, and ThreadSanitizer can follow only so many.
  return DEEP_EP_TSAN ? std::min(processors, 4) : processors;
}

}  // namespace

/// One CPU thread. Runs its blocks in turn, a slice each; when all of them only poll, it lets other threads of the
/// machine go first, then sleeps for moments.
class Worker {
 public:
  Worker() {
    // Never joined: the pool lives as long as the process.
    std::thread([this] { loop(); }).detach();
  }

  /// Runs `task` soon, between two slices.
  void post(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    inbox_.push_back(std::move(task));
    has_mail_.store(true, std::memory_order_release);
    wake_.notify_one();
  }
  /// Takes a block for its whole life.
  void start(std::shared_ptr<Kernel> kernel, int block) {
    post([this, kernel = std::move(kernel), block] {
      try {
        residents_.push_back(std::make_unique<Block>(kernel, block, fibers_));
      } catch (const std::exception& e) {
        kernel->fail("block " + std::to_string(block) + ": " + e.what());
        kernel->block_ended();
      }
    });
  }
  /// An executor is gone.
  void forget(const void* owner) {
    post([this, owner] { fibers_.forget(owner); });
  }

 private:
  [[noreturn]] void loop() {
    fibers_.release_birth();
    tsan::ignore_this_thread();
    for (int idle_rounds = 0;;) {
      take_tasks(idle_rounds);
      idle_rounds = run_blocks() ? 0 : idle_rounds + 1;
      if (idle_rounds == kPatientRounds) backoff_.restart();
    }
  }

  /// Runs what came into the inbox. Without blocks it waits there; if its blocks only poll, it naps.
  void take_tasks(int idle_rounds) {
    const bool naps = idle_rounds >= kPatientRounds;
    if (!residents_.empty() && !naps) {
      if (idle_rounds > 0) sched_yield();
      if (!has_mail_.load(std::memory_order_acquire)) return;
    }
    std::vector<std::function<void()>> tasks;
    {
      const auto mail = [this] { return !inbox_.empty(); };
      std::unique_lock lock(mutex_);
      if (residents_.empty()) {
        wake_.wait(lock, mail);
      } else if (naps) {
        wake_.wait_for(lock, backoff_.nap(), mail);
      }
      tasks.swap(inbox_);
      has_mail_.store(false, std::memory_order_relaxed);  // still under the lock, so no later mail loses its mark
    }
    for (auto& task : tasks) task();
  }

  /// A slice for every block. Returns whether any of them did more than poll.
  bool run_blocks() {
    bool progressed = false;
    for (std::size_t i = 0; i < residents_.size();) {
      const Block::Slice slice = residents_[i]->run(context_);
      progressed |= slice != Block::Slice::idle;
      if (slice != Block::Slice::finished) {
        ++i;
        continue;
      }
      const auto kernel = residents_[i]->kernel();
      residents_.erase(residents_.begin() + static_cast<std::ptrdiff_t>(i));
      kernel->block_ended();
    }
    return progressed;
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::function<void()>> inbox_;
  std::atomic<bool> has_mail_{false};

  // Only the worker's own thread touches these.
  Context context_;
  FiberPool fibers_;
  Backoff backoff_;  ///< since all blocks merely poll
  std::vector<std::unique_ptr<Block>> residents_;
};

WorkerPool::WorkerPool() {
  for (int left = chosen_size(); left > 0; --left) workers_.push_back(std::make_shared<Worker>());
}

Worker& WorkerPool::next() { return *workers_[turn_.fetch_add(1, std::memory_order_relaxed) % workers_.size()]; }

void WorkerPool::post(std::function<void()> task) { next().post(std::move(task)); }

void WorkerPool::start(const std::shared_ptr<Kernel>& kernel) {
  for (int block = 0; block < kernel->launch.shape.blocks; ++block) next().start(kernel, block);
}

void WorkerPool::forget(const void* owner) {
  for (auto& worker : workers_) worker->forget(owner);
}

WorkerPool& WorkerPool::instance() {
  // Never destroyed: executors may live in static objects, and sleeping workers need no farewell. A forked child has
  // none of its parent's threads, so it makes a pool of its own.
  static std::mutex mutex;
  static WorkerPool* pool = nullptr;
  const std::lock_guard lock(mutex);
  if (pool == nullptr || pool->home_.left()) pool = new WorkerPool();
  return *pool;
}

}  // namespace deep_ep::host_machine
