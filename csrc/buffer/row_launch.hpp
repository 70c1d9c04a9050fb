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

/// Shares `room` bytes of a block's shared memory out to the pipelines of `warps` warps, each like `pipe`. A warp has
/// as many whole rows as fit, from two to eight; rows too long for two are cut into pieces. `bytes()`: of the block,
/// with that `pipe`. Returns these.
template <class Bytes>
std::size_t plan_stages(PipeShape& pipe, int warps, std::size_t row_bytes, std::size_t room, const Bytes& bytes) {
  constexpr std::uint32_t kMost = 8;
  pipe = {kMost, 0};
  const std::size_t of_warp = (room - bytes()) / static_cast<std::size_t>(warps);
  const std::size_t row = align_to_line(row_bytes);
  pipe.stages = static_cast<std::uint32_t>(std::clamp<std::size_t>(of_warp / row, 2, kMost));
  pipe.stage_bytes = static_cast<std::uint32_t>(std::min(row, of_warp / 2 / kLine * kLine));
  return bytes();
}

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

}  // namespace deep_ep
