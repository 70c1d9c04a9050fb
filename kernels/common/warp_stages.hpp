// Shared memory of a block whose warps have a pipeline each, and nothing else.
#pragma once

#include "kernels/common/carver.hpp"
#include "kernels/primitives/mbarrier.hpp"

namespace deep_ep {

struct WarpStages {
  device::Mbarrier* barriers;  ///< [warps * stages]
  std::byte* memory;           ///< [warps * stages] of stage_bytes
  std::size_t bytes;

  DEEP_EP_HOST_DEVICE WarpStages(Carver carver, int warps, int stages, std::uint32_t stage_bytes)
      : barriers(carver.take<device::Mbarrier>(static_cast<std::size_t>(warps * stages), kLine)),
        memory(carver.take<std::byte>(static_cast<std::size_t>(warps * stages) * stage_bytes, kLine)),
        bytes(carver.bytes()) {}
};

}  // namespace deep_ep
