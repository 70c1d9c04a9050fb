// How warps cut rows into stages of shared memory, and launches of the kernels that move and add up rows within a
// device: they take what multiprocessors there are.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "csrc/executor/backend.hpp"
#include "kernels/common/limits.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep {

/// Shares `room` bytes of a block's shared memory out to the stages of `warps` warps: sets how many a warp has, and the
/// bytes of each. A warp has as many whole rows as fit, from two to eight; rows too long for two are cut into pieces.
/// `bytes(stages, stage_bytes)`: of the block. Returns these.
template <class Bytes>
std::size_t plan_stages(int& stages, std::uint32_t& stage_bytes, int warps, std::size_t row_bytes, std::size_t room,
                        const Bytes& bytes) {
  constexpr int kMost = 8;
  const std::size_t of_warp = (room - bytes(kMost, 0)) / static_cast<std::size_t>(warps);
  const std::size_t row = align_to_line(row_bytes);
  stages = static_cast<int>(std::clamp<std::size_t>(of_warp / row, 2, kMost));
  stage_bytes = static_cast<std::uint32_t>(std::min(row, of_warp / 2 / kLine * kLine));
  return bytes(stages, stage_bytes);
}

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
  const std::size_t shared_bytes = plan_stages(stages, stage_bytes, warps, row_bytes, policy.max_shared_bytes, bytes);
  return {static_cast<int>(std::clamp<std::int64_t>(units, 1, policy.multiprocessors)), warps * 32, shared_bytes};
}

/// How many warps have something to add to sums of rows.
inline std::int64_t pieces_of_sums(std::int64_t sums, std::int64_t row_bytes) {
  constexpr std::int64_t kBytesOfWarp = 512;
  return sums * ((row_bytes + kBytesOfWarp - 1) / kBytesOfWarp);
}

}  // namespace deep_ep
