// Bulk copies between global and shared memory by the copy engine (TMA, one dimension). Issued by one thread, done in
// the background. Addresses are 16-byte aligned; sizes are multiples of 16 and not zero.
//
// The engine accesses memory by another path ("proxy") than ordinary loads and stores, so that what orders those does
// not order its copies. What must lie between:
//   ordinary write to shared -> bulk store of it:  a proxy fence; no kernel does it, and the CPU executor has none
//   mbarrier::init -> bulk load that it counts:    mbarrier::fence_init(), then a sync
//   bulk load -> ordinary read of shared:          wait for the mbarrier, nothing else
//   bulk store read a stage -> stage is reused:    wait_read() by the issuing thread, then a sync
//   signal acquired -> bulk copy:                  fence_global() by whoever acquired, or by whoever copies. Without
//                                                  it, the copy may come before what the signal stands for: read what
//                                                  was there before, or overwrite what is still being read
//   bulk store -> signal to a peer:                wait(0) by the issuing thread, fence_global(), then a release at
//                                                  system scope: completion says that this thread sees the bytes, not
//                                                  that they have reached the peer. A relaxed store overtakes them on
//                                                  NVLink, which shows as rows of an earlier call.
//
// These are rules of the PTX ISA: sections "Async proxy", "cp.async.bulk.wait_group", and, for fences between proxies,
// "Causality Order" of the memory model. The fence in the last one goes further: PTX lets the completion imply it, but
// promises that the bytes are visible to "the executing thread" only. On the CPU a missing one of all these shows;
// machine/README.md says how.
#pragma once

#include "kernels/primitives/mbarrier.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/target.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device::bulk {

/// Copies from global to shared memory; the bytes count for the current phase of `barrier`, which must expect them.
DEEP_EP_DEVICE void load(void* shared, const void* global, std::uint32_t bytes, Mbarrier& barrier) {
#if DEEP_EP_TARGET_CUDA
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(shared)),
               "l"(__cvta_generic_to_global(global)), "r"(bytes), "r"(shared_address(&barrier))
               : "memory");
#else
  host_machine::current_thread->machine->bulk_load(shared, global, bytes, barrier.word);
#endif
}

/// Copies from shared to global memory (a peer's too), as part of this thread's open group.
DEEP_EP_DEVICE void store(void* global, const void* shared, std::uint32_t bytes) {
#if DEEP_EP_TARGET_CUDA
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(__cvta_generic_to_global(global)),
               "r"(shared_address(shared)), "r"(bytes)
               : "memory");
#else
  host_machine::current_thread->machine->bulk_store(global, shared, bytes);
#endif
}

/// Asks for global memory of this device to be brought nearer, which nobody waits for. Nothing depends on it.
DEEP_EP_DEVICE void prefetch([[maybe_unused]] const void* global, [[maybe_unused]] std::uint32_t bytes) {
#if DEEP_EP_TARGET_CUDA
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(global)), "r"(bytes));
#endif
}

/// Closes this thread's open group of stores (an empty one counts too) and opens the next.
DEEP_EP_DEVICE void commit() {
#if DEEP_EP_TARGET_CUDA
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#else
  host_machine::current_thread->machine->bulk_commit();
#endif
}

// A GPU takes the number of groups as a constant, here 0 to 7: with a larger one it waits like with 7.

namespace detail {
template <bool kRead, int kLeft = 0>
DEEP_EP_DEVICE void wait_groups(int groups_left) {
#if DEEP_EP_TARGET_CUDA
  if constexpr (kLeft < 7) {
    if (groups_left != kLeft) return wait_groups<kRead, kLeft + 1>(groups_left);
  }
  if constexpr (kRead) asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kLeft) : "memory");
  if constexpr (!kRead) asm volatile("cp.async.bulk.wait_group %0;" ::"n"(kLeft) : "memory");
#else
  host_machine::current_thread->machine->bulk_wait(groups_left, kRead);
#endif
}
}  // namespace detail

/// Waits until all but this thread's latest `groups_left` groups have read their shared memory: it may be reused.
/// Says nothing about the destination.
DEEP_EP_DEVICE void wait_read(int groups_left) { detail::wait_groups<true>(groups_left); }

/// Waits until all but this thread's latest `groups_left` groups are complete. Once it has called fence_global(), their
/// writes are visible to this thread and to whoever acquires a signal that it releases afterwards.
DEEP_EP_DEVICE void wait(int groups_left) { detail::wait_groups<false>(groups_left); }

/// Orders ordinary accesses of this thread to global memory, and what it acquired, before its later bulk copies, and
/// completed bulk copies before its later ordinary accesses.
DEEP_EP_DEVICE void fence_global() {
#if DEEP_EP_TARGET_CUDA
  asm volatile("fence.proxy.async.global;" ::: "memory");
#else
  host_machine::current_thread->machine->bulk_fence_global();
#endif
}

}  // namespace deep_ep::device::bulk
