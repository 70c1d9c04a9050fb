// What the threads of a block do together.
#pragma once

#include <cstdint>

#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/target.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device::block {

/// Waits for every thread of the block. What any of them wrote before is visible to all of them afterwards.
DEEP_EP_DEVICE void sync() {
#if DEEP_EP_TARGET_CUDA
  __syncthreads();
#else
  host_machine::current_thread->machine->block_sync();
#endif
}

/// The same, and true in all threads if `good` is true in every one. `scratch` is a word of shared memory that is not
/// in use: a GPU needs none, its barrier brings the answer.
DEEP_EP_DEVICE bool all(bool good, std::int32_t* scratch) {
#if DEEP_EP_TARGET_CUDA
  static_cast<void>(scratch);
  return __syncthreads_and(good ? 1 : 0) != 0;
#else
  sync();
  if (thread_index() == 0) *scratch = 1;
  sync();
  if (!good) store_relaxed<Scope::block>(scratch, 0);
  sync();
  const bool all_good = *scratch != 0;
  sync();
  return all_good;
#endif
}

/// By all threads: `work(i)` for each i below `count`, shared among them.
template <class Work>
DEEP_EP_DEVICE void each(int count, Work work) {
#pragma unroll 1
  for (int i = thread_index(); i < count; i += block_threads()) work(i);
}

}  // namespace deep_ep::device::block
