// A kernel thread: a stack, a place to go on, and what it waits for. Fibers are reused; only workers own them.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "kernels/primitives/host/machine.hpp"
#include "machine/context.hpp"

namespace deep_ep::host_machine {

class Block;

class Fiber : public Context {
 public:
  /// Why a fiber does not run; for the report when none can.
  enum class Wait : std::uint8_t { nothing, warp, barrier, mbarrier, finished };

  /// `birth_point`: a ThreadSanitizer sync point that the worker released at its start.
  explicit Fiber(const void* birth_point);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Makes it thread `thread` of `block`: the next switch to it enters the kernel.
  void prepare(Block& block, const ThreadState& thread);

  ThreadState state;
  Block* block = nullptr;
  Wait wait = Wait::nothing;
  const void* wait_object = nullptr;  ///< the Gathering or MbarrierState
  std::uint32_t wait_parity = 0;
  int meetings_of_poll =
      0;  ///< 0: it works; otherwise it polls, and one less than this is how often it met its warp since its last pause
  bool returned = false;  ///< the kernel thread before this one came back from all that it called
  void* tsan_context = nullptr;

 private:
  static void enter(Context& context);
};

/// Fibers of one worker that no kernel is using.
///
/// Under ThreadSanitizer a reused fiber looks synchronised with all that ran on it before, which would hide races
/// between ranks; a new one for each thread costs far too much. So there every executor has its own fibers: within one
/// rank, what ended before a kernel began is ordered with it in practice.
class FiberPool {
 public:
  std::unique_ptr<Fiber> take(std::uint64_t owner);
  void give_back(std::uint64_t owner, std::unique_ptr<Fiber> fiber);
  /// The owner is gone. Under ThreadSanitizer its fibers go, too: the clocks are as long as there are contexts, and
  /// every later test would carry those of the largest before it.
  void forget(std::uint64_t owner) { free_.erase(owner); }

  /// By the worker's thread, at its start: fibers may touch what the thread had initialised by then.
  void release_birth() { tsan::release(&birth_point_); }

 private:
  static constexpr std::uint64_t kAnyOwner = 0;  ///< executors count from 1
  std::vector<std::unique_ptr<Fiber>>& free_of(std::uint64_t owner) { return free_[DEEP_EP_TSAN ? owner : kAnyOwner]; }

  std::unordered_map<std::uint64_t, std::vector<std::unique_ptr<Fiber>>> free_;
  char birth_point_ = 0;
};

}  // namespace deep_ep::host_machine
