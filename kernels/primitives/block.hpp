// The barrier of a block.
#pragma once

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

}  // namespace deep_ep::device::block
