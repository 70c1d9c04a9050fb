// Where in the grid a thread is. Grids and blocks have one dimension; blocks are whole warps.
#pragma once

#include "kernels/primitives/target.hpp"
#if !DEEP_EP_TARGET_CUDA
#include "kernels/primitives/host/machine.hpp"
#endif

namespace deep_ep::device {

inline constexpr int kWarpSize = 32;

#if DEEP_EP_TARGET_CUDA
DEEP_EP_DEVICE int thread_index() { return static_cast<int>(threadIdx.x); }
DEEP_EP_DEVICE int block_index() { return static_cast<int>(blockIdx.x); }
DEEP_EP_DEVICE int block_threads() { return static_cast<int>(blockDim.x); }
DEEP_EP_DEVICE int grid_blocks() { return static_cast<int>(gridDim.x); }
#else
DEEP_EP_DEVICE int thread_index() { return host_machine::current_thread->thread; }
DEEP_EP_DEVICE int block_index() { return host_machine::current_thread->block; }
DEEP_EP_DEVICE int block_threads() { return host_machine::current_thread->block_threads; }
DEEP_EP_DEVICE int grid_blocks() { return host_machine::current_thread->grid_blocks; }
#endif

DEEP_EP_DEVICE int lane_index() { return thread_index() % kWarpSize; }
DEEP_EP_DEVICE int warp_index() { return thread_index() / kWarpSize; }
DEEP_EP_DEVICE int block_warps() { return block_threads() / kWarpSize; }

}  // namespace deep_ep::device
