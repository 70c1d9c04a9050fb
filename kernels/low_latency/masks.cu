// Programs read and change their masks, in the order of calls: see LowLatencyMasksParams.
#include "kernels/common/faults.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/params.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

/// By one block. Verdicts that have come count from here on, so a query gives the masks of the next call. Only this
/// kernel, of which one runs at a time, changes the program's part of a mask.
DEEP_EP_DEVICE void masks_body(const LowLatencyMasksParams& params, std::byte*) {
  ControlState& control = *params.wait.control;
  if (thread_index() == 0) take_verdict(params.wait);
  block::sync();
  block::each(control.num_ranks, [&](int rank) {
    const std::uint64_t mask = load_relaxed<Scope::gpu>(control.mask + rank);
    if (params.step == LowLatencyMasksStep::query) {
      params.status[rank] = mask != 0 ? 1 : 0;
    } else if (params.rank < 0 || params.rank == rank) {
      const std::uint64_t wanted = params.step == LowLatencyMasksStep::mask ? kMaskedByProgram : 0;
      add_relaxed<Scope::gpu>(control.mask + rank, wanted - mask % kMaskedByVerdict);
    }
  });
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(masks_low_latency, deep_ep::device::low_latency::masks_body)
