// How kernels count calls: which one is this, and does it take place?
//
// The host passes no numbers, so that a graph replay is a new call. Calls of a kind are counted in device memory; every
// block reads the count when it begins, and it advances when all blocks have: here the last one to arrive at a ticket
// advances it. V2's dispatch has a block that ends last, and low-latency blocks each add their part.
#pragma once

#include <cstdint>

#include "kernels/common/faults.hpp"
#include "kernels/common/tickets.hpp"

namespace deep_ep {

/// Counts calls of one kind. In device memory of the buffer; zero when the buffer is made.
struct CallCounter {
  std::uint64_t calls;    ///< so far
  std::uint32_t arrived;  ///< blocks of the present call; the last one sets it back to zero

  DEEP_EP_DEVICE std::uint64_t epoch() const { return device::load_relaxed<device::Scope::gpu>(&calls) + 1; }
  /// By one thread: the call counts. The kernels of later calls see it, as they begin after this one has ended.
  DEEP_EP_DEVICE void count(std::uint64_t epoch) { device::store_relaxed<device::Scope::gpu>(&calls, epoch); }
};

namespace device {

/// A call as one block of its kernel knows it.
struct Call {
  CallCounter& counter;
  std::uint64_t epoch;
  bool begun;

  /// By all threads of the block, before anything else. After a fault that the host has not seen yet, no call takes
  /// place, nor does it count: ranks that learn of the fault at different times stay in step.
  DEEP_EP_DEVICE static Call begin(CallCounter& counter, const WaitContext& wait) {
    const std::uint64_t epoch = counter.epoch();
    return {counter, epoch, block::all(!aborted(wait))};
  }

  /// By all threads of the block, when its work is done. The last block does `finish()` for all of them. Scope::gpu is
  /// cheaper, and enough where that raises no signals.
  template <Scope S = Scope::system, class Finish>
  DEEP_EP_DEVICE void end(Finish finish) const {
    if (!last_block_to_arrive<S>(&counter.arrived)) return;
    finish();
    block::sync();
    if (thread_index() == 0 && begun) counter.count(epoch);
  }
};

}  // namespace device
}  // namespace deep_ep
