// A kernel thread: a stack, a place to go on, and what it waits for. Fibers are reused; only workers own them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "csrc/executor/host/context.hpp"
#include "kernels/primitives/host/machine.hpp"

namespace deep_ep::host_machine {

class Block;

class Fiber : public Context {
 public:
  /// Why a fiber does not run; for the report when nobody can.
  enum class Wait : std::uint8_t { nothing, warp, barrier, mbarrier, finished };

  Fiber();
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Makes it thread `thread` of `block`: the next switch to it enters the kernel.
  void prepare(Block& block, const ThreadState& thread);
  /// The kernel thread is over. The stack stays for the next one.
  void retire();

  ThreadState state;
  Block* block = nullptr;
  Wait wait = Wait::nothing;
  const void* wait_object = nullptr;  ///< the Warp, Barrier or MbarrierState
  std::uint32_t wait_parity = 0;
  void* tsan_context = nullptr;

 private:
  static void enter(boost::context::detail::transfer_t from);
};

/// Fibers of one worker that no kernel uses at the moment.
class FiberPool {
 public:
  std::unique_ptr<Fiber> take();
  void give_back(std::unique_ptr<Fiber> fiber);

 private:
  std::vector<std::unique_ptr<Fiber>> free_;
};

}  // namespace deep_ep::host_machine
