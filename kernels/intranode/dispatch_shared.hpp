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

/// Addresses within the block's dynamic shared memory.
struct DispatchShared {
  int num_ranks, warps, stages;
  std::uint32_t stage_bytes;

  DEEP_EP_HOST_DEVICE static std::size_t align(std::size_t bytes) { return (bytes + 127) / 128 * 128; }
  DEEP_EP_HOST_DEVICE std::size_t barriers_at() const {
    return align(128 + sizeof(DispatchTarget) * static_cast<std::size_t>(num_ranks));
  }
  DEEP_EP_HOST_DEVICE std::size_t stages_at() const {
    return align(barriers_at() + sizeof(device::Mbarrier) * static_cast<std::size_t>(warps * stages));
  }
  DEEP_EP_HOST_DEVICE std::size_t bytes() const {
    return stages_at() + static_cast<std::size_t>(warps * stages) * stage_bytes;
  }

  DEEP_EP_HOST_DEVICE std::int32_t* scratch(std::byte* memory) const { return reinterpret_cast<std::int32_t*>(memory); }
  DEEP_EP_HOST_DEVICE DispatchTarget* targets(std::byte* memory) const {
    return reinterpret_cast<DispatchTarget*>(memory + 128);
  }
  DEEP_EP_HOST_DEVICE device::Mbarrier* barriers(std::byte* memory, int warp) const {
    return reinterpret_cast<device::Mbarrier*>(memory + barriers_at()) + warp * stages;
  }
  DEEP_EP_HOST_DEVICE std::byte* stage(std::byte* memory, int warp, int stage) const {
    return memory + stages_at() + static_cast<std::size_t>(warp * stages + stage) * stage_bytes;
  }
};

}  // namespace deep_ep
