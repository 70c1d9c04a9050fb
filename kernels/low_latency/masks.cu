// Programs read and change their masks, in the order of calls: see LowLatencyMasksParams.
#include "kernels/common/faults.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/params.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

/// By one block. Verdicts that have come count from here on, so a query gives the masks of the next call.
DEEP_EP_DEVICE void masks_body(const LowLatencyMasksParams& params, std::byte*) {
  ControlState& control = *params.wait.control;
  if (thread_index() == 0) take_verdict(params.wait);
  block::sync();
  for (int rank = thread_index(); rank < control.num_ranks; rank += block_threads()) {
    if (params.step == LowLatencyMasksStep::query) {
      params.status[rank] = load_relaxed<Scope::gpu>(control.mask + rank) != 0 ? 1 : 0;
    } else if (params.rank < 0 || params.rank == rank) {
      change_mask(control, rank, kMaskedByProgram, params.step == LowLatencyMasksStep::mask);
    }
  }
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(masks_low_latency, deep_ep::device::low_latency::masks_body)
