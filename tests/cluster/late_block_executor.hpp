// On the CPU executor: a block of a kernel that begins later than all others, and than another rank's next call.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

#include "kernels/primitives/host/machine.hpp"
#include "tests/cluster/counting_executor.hpp"

namespace deep_ep::test {

/// Ranks that share it are threads.
struct LateBlock {
  int block;                  ///< the late one, of each dispatch of the second interface
  std::atomic<int> begun{0};  ///< such dispatches that the other rank has begun
};

/// The executor of the rank whose block is late, or (`late` false) of the rank that goes ahead.
class LateBlockExecutor final : public CountingExecutor {
 public:
  LateBlockExecutor(const std::shared_ptr<Executor>& inner, LateBlock& shared, bool late)
      : CountingExecutor(inner), table_(CountingExecutor::kernels()) {
    now_ = Wrapping{&shared, late, 0};
    table_.dispatch_elastic = &launch;
  }
  const KernelTable& kernels() const override { return table_; }

 private:
  using Clock = std::chrono::steady_clock;

  struct Wrapping {
    LateBlock* shared;
    bool late;
    int calls;  ///< so far
  };
  struct Wrapped {
    std::shared_ptr<const void> params;
    void (*entry)(const void* params, std::byte* shared);
    Wrapping wrapping;
    Clock::time_point launched;
  };
  struct Queue final : host_machine::LaunchQueue {
    explicit Queue(void* stream) : to(*static_cast<host_machine::LaunchQueue*>(stream)) {}
    void launch(host_machine::KernelLaunch launch) override {
      ++now_.calls;
      launch.params = std::make_shared<const Wrapped>(std::move(launch.params), launch.entry, now_, Clock::now());
      launch.entry = &run;
      to.launch(std::move(launch));
    }
    host_machine::LaunchQueue& to;
  };

  static void launch(const ElasticDispatchParams& params, const LaunchShape& shape, void* stream) {
    Queue queue(stream);
    host_kernels().dispatch_elastic(params, shape, &queue);
  }
  static void run(const void* params, std::byte* memory) {
    const auto& kernel = *static_cast<const Wrapped*>(params);
    const Wrapping& wrapping = kernel.wrapping;
    host_machine::ThreadState& self = *host_machine::current_thread;
    if (!wrapping.late && self.block == 0 && self.thread == 0) ++wrapping.shared->begun;
    if (wrapping.late && self.block == wrapping.shared->block) wait(self, wrapping, kernel.launched);
    kernel.entry(kernel.params.get(), memory);
  }
  /// Until the other rank is well inside its next call: or for so long that it does not come there without this block.
  static void wait(host_machine::ThreadState& self, const Wrapping& wrapping, Clock::time_point launched) {
    Clock::time_point ahead{};
    for (;;) {
      const Clock::time_point now = Clock::now();
      if (ahead == Clock::time_point{} && wrapping.shared->begun > wrapping.calls) ahead = now;
      if (ahead != Clock::time_point{} && now - ahead > std::chrono::milliseconds(5)) return;
      if (now - launched > std::chrono::milliseconds(60)) return;
      self.machine->pause(1);
    }
  }

  inline static thread_local Wrapping now_;  ///< each rank is a thread, which launches its kernels itself
  KernelTable table_;
};

}  // namespace deep_ep::test
