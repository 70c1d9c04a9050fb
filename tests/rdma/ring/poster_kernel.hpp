// A kernel that posts 32 rows which become ready one after the other, to see what that costs.
#pragma once

#include "kernels/common/faults.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep::test {

/// One warp. A row is ready when the one before it has been posted. Nobody executes the entries.
struct PosterCostParams {
  RdmaPeerParams peer;
  device::rdma::CompletionEntry* completion = nullptr;  ///< the one of `peer`
  bool completes = false;  ///< everything is complete as soon as the next row is posted; otherwise nothing ever is
  std::uint64_t* told = nullptr;  ///< device memory
  WaitContext wait;
};

}  // namespace deep_ep::test

DEEP_EP_DECLARE_KERNEL(poster_cost, deep_ep::test::PosterCostParams, 32)
