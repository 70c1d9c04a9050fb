// On the CPU executor: a block of a kernel that begins later than all others, and than another rank's next call.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string_view>
#include <utility>

#include "tests/cluster/launches_executor.hpp"

namespace deep_ep::test {

/// Ranks that share it are threads.
struct LateBlock {
  int block;                  ///< the late one, of each dispatch of the second interface
  std::atomic<int> begun{0};  ///< such dispatches that the other rank has begun
};

/// The executor of the rank whose block is late, or (`late` false) of the rank that goes ahead.
class LateBlockExecutor final : public LaunchesExecutor {
 public:
  LateBlockExecutor(const std::shared_ptr<Executor>& inner, LateBlock& shared, bool late)
      : LaunchesExecutor(inner), shared_(shared), late_(late) {}

 private:
  using Clock = std::chrono::steady_clock;

  struct Wrapped {
    host_machine::KernelLaunch kernel;
    LateBlock& shared;
    bool late;
    int calls;  ///< so far
    Clock::time_point launched;
  };

  void launch(host_machine::KernelLaunch kernel, StreamHandle stream) override {
    if (kernel.name == std::string_view("dispatch_elastic")) {
      kernel.params = std::make_shared<const Wrapped>(Wrapped{kernel, shared_, late_, ++calls_, Clock::now()});
      kernel.entry = &run;
    }
    host_machine::enqueue(std::move(kernel), stream);
  }
  static void run(const void* params, std::byte* memory) {
    const auto& one = *static_cast<const Wrapped*>(params);
    host_machine::ThreadState& self = *host_machine::current_thread;
    if (!one.late && self.block == 0 && self.thread == 0) ++one.shared.begun;
    if (one.late && self.block == one.shared.block) wait(self, one);
    one.kernel.entry(one.kernel.params.get(), memory);
  }
  /// Until the other rank is well inside its next call: or for so long that it does not come there without this block.
  static void wait(host_machine::ThreadState& self, const Wrapped& one) {
    Clock::time_point ahead{};
    for (;;) {
      const Clock::time_point now = Clock::now();
      if (ahead == Clock::time_point{} && one.shared.begun > one.calls) ahead = now;
      if (ahead != Clock::time_point{} && now - ahead > std::chrono::milliseconds(5)) return;
      if (now - one.launched > std::chrono::milliseconds(60)) return;
      self.machine->pause(1);
    }
  }

  LateBlock& shared_;
  const bool late_;
  int calls_ = 0;
};

}  // namespace deep_ep::test
