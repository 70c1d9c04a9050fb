// Launches of the kernels that move and add up rows within a device: they need no shared memory, and take what there
// is.
#pragma once

#include <algorithm>
#include <cstdint>

#include "csrc/executor/backend.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep {

/// A warp for each unit of work, as far as the device has room for warps that have no shared memory.
inline LaunchShape shape_for_warps(std::int64_t units, const LaunchPolicy& policy, int most_threads) {
  constexpr int kBlocksOfMultiprocessor = 8;
  const int warps = std::min(policy.warps_per_block, most_threads / 32);
  const std::int64_t blocks = std::min<std::int64_t>((units + warps - 1) / warps,
                                                     std::int64_t{policy.multiprocessors} * kBlocksOfMultiprocessor);
  return {static_cast<int>(std::max<std::int64_t>(blocks, 1)), warps * 32, 0};
}

/// How many warps have something to add to sums of rows.
inline std::int64_t pieces_of_sums(std::int64_t sums, std::int64_t row_bytes) {
  constexpr std::int64_t kBytesOfWarp = 512;
  return sums * ((row_bytes + kBytesOfWarp - 1) / kBytesOfWarp);
}

/// For sums of rows that are in this device's memory. The caller has made the device current.
inline void launch_sum_rows(const Backend& backend, const SumRowsParams& params, StreamHandle stream) {
  backend.kernels().sum_rows(params,
                             shape_for_warps(pieces_of_sums(params.num_sums, params.row_bytes), backend.policy(),
                                             kernels::sum_rows::kMaxThreads),
                             stream);
}

}  // namespace deep_ep
