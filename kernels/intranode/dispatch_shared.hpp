// Shared memory of a dispatch block: where the peers want rows, and every warp's stages.
#pragma once

#include "kernels/intranode/params.hpp"
#include "kernels/primitives/mbarrier.hpp"

namespace deep_ep {

/// What a sender knows of one destination.
struct DispatchTarget {
  RowTargets rows;            ///< its memory, as mapped here; in its window: our part of it
  std::int64_t capacity;      ///< rows it has room for in all
  std::uint32_t window_rows;  ///< 0: rows go to their final place
  std::int32_t first_row;     ///< of our segment in its output
  std::uint32_t rounds;       ///< in how many rounds our rows fit its window
};

struct DispatchShared {
  std::int32_t* scratch;
  DispatchTarget* targets;  ///< [num_ranks]
  device::Mbarrier* barriers;
  std::byte* stages;
  std::size_t bytes;
  int num_stages;
  std::uint32_t stage_bytes;

  DEEP_EP_HOST_DEVICE DispatchShared(Carver carver, int num_ranks, int warps, int num_stages, std::uint32_t stage_bytes)
      : scratch(carver.take<std::int32_t>()),
        targets(carver.take<DispatchTarget>(static_cast<std::size_t>(num_ranks), kLine)),
        barriers(carver.take<device::Mbarrier>(static_cast<std::size_t>(warps * num_stages), kLine)),
        stages(carver.take<std::byte>(static_cast<std::size_t>(warps * num_stages) * stage_bytes, kLine)),
        bytes(carver.bytes()),
        num_stages(num_stages),
        stage_bytes(stage_bytes) {}

  DEEP_EP_DEVICE device::Mbarrier& barrier(int warp, int stage) const { return barriers[warp * num_stages + stage]; }
  DEEP_EP_DEVICE std::byte* stage(int warp, int stage) const {
    return stages + static_cast<std::size_t>(warp * num_stages + stage) * stage_bytes;
  }
};

}  // namespace deep_ep
