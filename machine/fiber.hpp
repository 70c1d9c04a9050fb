// A kernel thread: a stack, a place to go on, and what it waits for. Fibers are reused; only workers own them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "kernels/primitives/host/machine.hpp"
#include "machine/context.hpp"

namespace deep_ep::host_machine {

class Block;
struct Gathering;

/// The point where threads meet. A thread releases it before it arrives and acquires it when it goes on, for
/// ThreadSanitizer too, to which the address is enough.
///
/// Has a thread a proxy fence between what it has acquired and its next bulk copy? An acquire orders ordinary accesses.
/// The copy engine's come by another proxy, and stay behind the signal only if a proxy fence lies between (PTX ISA,
/// "Causality Order": proxy-preserved base causality order). A copy that came too early cannot be shown afterwards, so
/// a missing fence is an error here instead of a wrong result.
///
/// Acquires are numbered when their thread meets others. A thread knows how many acquires lie in its past, and up to
/// which of them a fence does. That is one number where an exact answer would take one per thread: an acquire without a
/// fence goes unnoticed if a thread that did not know of it numbered one later and fenced it, and both met afterwards.
struct MeetingPoint {
  std::uint64_t acquired = 0;  ///< number of the last acquire in the past of those who came
  std::uint64_t fenced = 0;    ///< and of the last one with a proxy fence behind it

  void join(const MeetingPoint& other) {
    acquired = std::max(acquired, other.acquired);
    fenced = std::max(fenced, other.fenced);
  }
};

/// The bulk stores of a thread: see block_bulk.cpp.
struct BulkStore {
  std::byte* global;
  const std::byte* shared;
  std::uint32_t bytes;
  std::uint64_t group;
  bool waited = false;              ///< the program waited for the read (a seeded schedule may read and write unasked)
  std::vector<std::byte> buffer{};  ///< what the engine has read; empty: nothing yet
};
struct BulkStores {
  std::vector<BulkStore> stores;  ///< in the order of issue
  std::size_t complete = 0;       ///< so many, from the first, have been waited for
  std::size_t written = 0;        ///< so many are in memory
  std::uint64_t open_group = 0;
};

class Fiber : public Context {
 public:
  /// `birth_point`: a ThreadSanitizer sync point that the worker released at its start.
  explicit Fiber(const void* birth_point);
  ~Fiber() override;
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  /// Makes it thread `thread` of `block`: the next switch to it enters the kernel.
  void prepare(Block& block, const ThreadState& thread);

  ThreadState state;
  Block* block = nullptr;
  const Gathering* waits = nullptr;  ///< where; null: it can run
  bool finished = false;
  BulkStores copies;
  MeetingPoint past;  ///< what the thread knows of acquires
  /// 0: it works; otherwise it polls, and one less than this is how often it met its warp since its last pause.
  int meetings_of_poll = 0;
  bool returned = false;  ///< the kernel thread before this one came back from all that it called
  void* tsan_context = nullptr;

 private:
  DEEP_EP_NO_TSAN void enter() override;
};

/// Fibers of one worker that no kernel is using.
///
/// Under ThreadSanitizer a reused fiber looks synchronised with all that ran on it before, which would hide races
/// between ranks; a new one for each thread costs far too much. So there every executor has its own fibers: within one
/// rank, what ended before a kernel began is ordered with it in practice.
class FiberPool {
 public:
  /// `owner`: the executor.
  std::unique_ptr<Fiber> take(const void* owner);
  std::vector<std::unique_ptr<Fiber>>& free_of(const void* owner) { return free_[DEEP_EP_TSAN ? owner : nullptr]; }
  /// The owner is gone. Under ThreadSanitizer its fibers go, too: the clocks are as long as there are contexts, and
  /// every later test would carry those of the largest before it.
  void forget(const void* owner) { free_.erase(owner); }

  /// By the worker's thread, at its start: fibers may touch what the thread had initialised by then.
  void release_birth() { tsan::release(&birth_point_); }

 private:
  std::unordered_map<const void*, std::vector<std::unique_ptr<Fiber>>> free_;
  char birth_point_ = 0;
};

}  // namespace deep_ep::host_machine
