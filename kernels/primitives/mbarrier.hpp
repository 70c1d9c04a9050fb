// Barriers in shared memory that count bytes, so that bulk loads can complete them. A phase ends when one thread has
// arrived and all bytes that it expects were written; the next begins at once. Phases alternate in parity, beginning
// with 0. Life of one: one thread calls init, fence_init; a sync; then each phase: one thread calls arrive_expect_bytes
// and bulk::load ..., all wait(parity).
#pragma once

#include "kernels/primitives/target.hpp"
#include "kernels/primitives/thread.hpp"
#if DEEP_EP_TARGET_CUDA
#include <cuda/ptx>
#endif

namespace deep_ep::device {

#if DEEP_EP_TARGET_CUDA
/// As instructions for shared memory alone take it.
DEEP_EP_DEVICE std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}
#endif

struct alignas(8) Mbarrier {
  std::uint64_t word;
};

namespace mbarrier {

/// By one thread, before any other thread touches it.
DEEP_EP_DEVICE void init(Mbarrier& barrier) {
#if DEEP_EP_TARGET_CUDA
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(&barrier)) : "memory");
#else
  host_machine::current_thread->machine->mbarrier_init(barrier.word);
#endif
}

/// By the thread that called init, after it and before the block::sync that hands the barriers out: makes the
/// initialised barriers known to the copy engine.
DEEP_EP_DEVICE void fence_init() {
#if DEEP_EP_TARGET_CUDA
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
  host_machine::current_thread->machine->mbarrier_fence_init();
#endif
}

/// One arrival, and `bytes` more that bulk loads must write before the phase ends. What this thread wrote before is
/// visible to those who wait for the phase.
DEEP_EP_DEVICE void arrive_expect_bytes(Mbarrier& barrier, std::uint32_t bytes) {
#if DEEP_EP_TARGET_CUDA
  namespace ptx = ::cuda::ptx;
  ptx::mbarrier_arrive_expect_tx(ptx::sem_release, ptx::scope_cta, ptx::space_shared, &barrier.word, bytes);
#else
  host_machine::current_thread->machine->mbarrier_arrive(barrier.word, bytes);
#endif
}

/// Waits for the end of the phase of this parity: the writes before its arrival and its loads' bytes are visible to
/// this thread then. Without deadline: use it for what this block itself has under way.
DEEP_EP_DEVICE void wait(Mbarrier& barrier, std::uint32_t parity) {
#if DEEP_EP_TARGET_CUDA
  while (!::cuda::ptx::mbarrier_try_wait_parity(&barrier.word, parity)) {
  }
#else
  host_machine::current_thread->machine->mbarrier_wait(barrier.word, parity);
#endif
}

}  // namespace mbarrier
}  // namespace deep_ep::device
