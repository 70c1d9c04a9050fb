// Launches of the kernels that move and add up rows within a device: they take what multiprocessors there are.
#pragma once

#include <algorithm>
#include <cstdint>

#include "csrc/buffer/row_stages.hpp"
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

/// A block for each multiprocessor, or for each of few `units` of work: its warps, which move pieces of at most
/// `row_bytes`, share all shared memory for their pipelines.
inline LaunchShape shape_for_pipelines(std::int64_t units, std::size_t row_bytes, const LaunchPolicy& policy,
                                       int most_threads, int& stages, std::uint32_t& stage_bytes) {
  const int warps = std::min(policy.warps_per_block, most_threads / 32);
  const auto bytes = [&](int count, std::uint32_t size) {
    return WarpStages(Carver::without_memory(), warps, count, size).bytes;
  };
  const std::size_t room = policy.max_shared_bytes - bytes(RowStages::kMost, 0);
  const RowStages fitting =
      RowStages::make(room / static_cast<std::size_t>(warps), std::max<std::size_t>(row_bytes, 1));
  stages = fitting.count;
  stage_bytes = row_bytes == 0 ? 0 : fitting.bytes;
  return {static_cast<int>(std::clamp<std::int64_t>(units, 1, policy.multiprocessors)), warps * 32,
          bytes(stages, stage_bytes)};
}

/// How many warps have something to add to sums of rows.
inline std::int64_t pieces_of_sums(std::int64_t sums, std::int64_t row_bytes) {
  constexpr std::int64_t kBytesOfWarp = 512;
  return sums * ((row_bytes + kBytesOfWarp - 1) / kBytesOfWarp);
}

}  // namespace deep_ep
