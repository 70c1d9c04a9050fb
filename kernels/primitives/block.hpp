// What the threads of a block do together.
#pragma once

#include "kernels/primitives/target.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device::block {

/// Waits for every thread of the block. What any of them wrote before is visible to all of them afterwards.
DEEP_EP_DEVICE void sync() {
#if DEEP_EP_TARGET_CUDA
  __syncthreads();
#else
  host_machine::current_thread->machine->block_sync(true);
#endif
}

/// The same, and true in all threads if `good` is true in every one.
DEEP_EP_DEVICE bool all(bool good) {
#if DEEP_EP_TARGET_CUDA
  return __syncthreads_and(good ? 1 : 0) != 0;
#else
  return host_machine::current_thread->machine->block_sync(good);
#endif
}

/// By any thread of a block that waits for nothing from outside any more that is not on its way already. When every
/// block has come here or ended, those of the next kernel get to SMs that are free, and wait there for the end of this
/// one. Earlier they might take what the kernel of another rank needs, for which this one waits.
DEEP_EP_DEVICE void let_next_kernel_start() {
#if DEEP_EP_TARGET_CUDA
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/// By all threads: `work(i)` for each i below `count`, shared among them.
template <class Work>
DEEP_EP_DEVICE void each(int count, Work work) {
#pragma unroll 1
  for (int i = thread_index(); i < count; i += block_threads()) work(i);
}

}  // namespace deep_ep::device::block
