#include "machine/worker_pool.hpp"

#include <sched.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "csrc/support/backoff.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/threads.hpp"
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
    const SignalsBlocked blocked;
    std::thread([this] {
      name_this_thread("deep_ep_cpu");
      loop();
    }).detach();
  }

  /// Runs `task` soon, between two slices.
  void post(std::function<void()> task) {
    const std::lock_guard lock(mutex_);
    inbox_.push_back(std::move(task));
    wake_.notify_one();
  }
  /// In a task: takes a block for its whole life.
  void take(const std::shared_ptr<Kernel>& kernel, int block) {
    try {
      residents_.push_back(std::make_unique<Block>(kernel, block, fibers_));
    } catch (const std::exception& e) {
      kernel->fail("block " + std::to_string(block) + ": " + e.what());
      kernel->block_ended();
    }
  }
  /// In a task: an executor is gone.
  void forget(const void* owner) { fibers_.forget(owner); }

 private:
  [[noreturn]] void loop() {
    fibers_.release_birth();
    tsan::ignore_this_thread();
    for (int idle_rounds = 0;;) {
      take_tasks(idle_rounds);
      idle_rounds = run_blocks() ? 0 : idle_rounds + 1;
      if (idle_rounds > 0) sched_yield();
      if (idle_rounds == kPatientRounds) backoff_.restart();
    }
  }

  /// Runs what came into the inbox. Without blocks it waits there; if its blocks only poll, it naps.
  void take_tasks(int idle_rounds) {
    std::vector<std::function<void()>> tasks;
    {
      const auto mail = [this] { return !inbox_.empty(); };
      std::unique_lock lock(mutex_);
      if (residents_.empty()) {
        wake_.wait(lock, mail);
      } else if (idle_rounds >= kPatientRounds) {
        wake_.wait_for(lock, backoff_.nap(), mail);
      }
      tasks.swap(inbox_);
    }
    for (auto& task : tasks) task();
  }

  /// A slice for every block. Returns whether any of them did more than poll.
  bool run_blocks() {
    bool progressed = false;
    std::erase_if(residents_, [&](const auto& block) {
      const Block::Slice slice = block->run(context_);
      progressed |= slice != Block::Slice::idle;
      return slice == Block::Slice::finished;
    });
    return progressed;
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::function<void()>> inbox_;

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
  for (int block = 0; block < kernel->launch.shape.blocks; ++block) {
    Worker& worker = next();
    worker.post([&worker, kernel, block] { worker.take(kernel, block); });
  }
}

void WorkerPool::forget(const void* owner) {
  for (auto& worker : workers_) worker->post([worker, owner] { worker->forget(owner); });
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
