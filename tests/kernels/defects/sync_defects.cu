// Mistakes between the threads of a block.
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"
#include "tests/kernels/defects/defects.hpp"

namespace deep_ep::device {
namespace {

using defects::Params;

/// Planted: another lane's word is read without synchronising with that lane.
DEEP_EP_DEVICE void missing_warp_sync(const Params& p, std::byte* shared) {
  auto* words = reinterpret_cast<std::uint32_t*>(shared);
  const int partner = thread_index() ^ 31;
  words[thread_index()] = 1000u + static_cast<std::uint32_t>(thread_index());
  if (!p.planted) warp::sync();
  p.result[thread_index()] = words[partner];
}

/// Planted: the warps synchronise, the block does not.
DEEP_EP_DEVICE void missing_block_sync(const Params& p, std::byte* shared) {
  auto* words = reinterpret_cast<std::uint32_t*>(shared);
  const int partner = (thread_index() + kWarpSize) % block_threads();
  words[thread_index()] = 1000u + static_cast<std::uint32_t>(thread_index());
  if (p.planted) {
    warp::sync();
  } else {
    block::sync();
  }
  p.result[thread_index()] = words[partner];
}

/// Planted: a counter in shared memory is trusted to begin with zero.
DEEP_EP_DEVICE void uninitialised_shared(const Params& p, std::byte* shared) {
  auto* counter = reinterpret_cast<std::uint32_t*>(shared);
  if (thread_index() == 0 && !p.planted) *counter = 0;
  block::sync();
  fetch_add_relaxed<Scope::block>(counter, 1);
  block::sync();
  p.result[thread_index()] = *counter;
}

}  // namespace
}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(defect_missing_warp_sync, deep_ep::device::missing_warp_sync)
DEEP_EP_DEFINE_KERNEL(defect_missing_block_sync, deep_ep::device::missing_block_sync)
DEEP_EP_DEFINE_KERNEL(defect_uninitialised_shared, deep_ep::device::uninitialised_shared)
