// Barriers of a block: the whole block's, and fifteen named ones for groups of warps.
#pragma once

#include "kernels/primitives/target.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device::block {

/// Waits for every thread of the block. What any of them wrote before is visible to all of them afterwards.
DEEP_EP_DEVICE void sync() {
#if DEEP_EP_TARGET_CUDA
  __syncthreads();
#else
  host_machine::current_thread->machine->barrier_sync(0, block_threads());
#endif
}

/// Named barrier `id` (1 to 15): waits until `threads` threads (a multiple of 32) have come through sync or arrive.
/// What they wrote before is visible afterwards. Every thread of a warp must come.
DEEP_EP_DEVICE void sync(int id, int threads) {
#if DEEP_EP_TARGET_CUDA
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
  host_machine::current_thread->machine->barrier_sync(id, threads);
#endif
}

/// Counts as arriving at named barrier `id`, without waiting: what this thread wrote before is visible to those who
/// sync.
DEEP_EP_DEVICE void arrive(int id, int threads) {
#if DEEP_EP_TARGET_CUDA
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
#else
  host_machine::current_thread->machine->barrier_arrive(id, threads);
#endif
}

}  // namespace deep_ep::device::block
