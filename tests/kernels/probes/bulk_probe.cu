// A pipeline as the real kernels have it: every warp moves rows through two stages; loads run ahead, lanes change the
// bytes, stores run behind.
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/bulk.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"
#include "tests/kernels/probes/probes.hpp"

namespace deep_ep::device {
namespace {

constexpr int kStages = 2;

DEEP_EP_DEVICE void bulk_probe(const probes::BulkParams& p, std::byte* shared) {
  const auto row_bytes = static_cast<std::uint32_t>(p.row_bytes);
  auto* barriers = reinterpret_cast<Mbarrier*>(shared) + warp_index() * kStages;
  std::byte* stages = shared + 1024 + warp_index() * kStages * p.row_bytes;
  const int first = block_index() * block_warps() + warp_index();
  const int step = grid_blocks() * block_warps();
  if (lane_index() == 0) {
    for (int s = 0; s < kStages; ++s) mbarrier::init(barriers[s], 1);
    mbarrier::fence_init();
  }
  block::sync();
  const auto load = [&](int row, int s) {
    mbarrier::arrive_expect_bytes(barriers[s], row_bytes);
    bulk::load(stages + s * p.row_bytes, p.source + static_cast<std::int64_t>(row) * p.row_bytes, row_bytes,
               barriers[s]);
  };
  if (lane_index() == 0) {
    for (int s = 0; s < kStages && first + s * step < p.rows; ++s) load(first + s * step, s);
  }
  for (int row = first, n = 0; row < p.rows; row += step, ++n) {
    const int s = n % kStages;
    std::byte* stage = stages + s * p.row_bytes;
    mbarrier::wait(barriers[s], static_cast<std::uint32_t>(n / kStages & 1));
    for (int i = lane_index(); i < p.row_bytes; i += kWarpSize) {
      stage[i] = static_cast<std::byte>(static_cast<unsigned char>(stage[i]) + 1);
    }
    bulk::publish(stage, row_bytes);
    warp::sync();
    if (lane_index() == 0) {
      bulk::store(p.destination + static_cast<std::int64_t>(row) * p.row_bytes, stage, row_bytes);
      bulk::commit();
      if (row + kStages * step < p.rows) {
        bulk::wait_read<0>();
        load(row + kStages * step, s);
      }
    }
    warp::sync();
  }
  if (lane_index() == 0) {
    bulk::wait<0>();
    for (int s = 0; s < kStages; ++s) mbarrier::invalidate(barriers[s]);
  }
}

}  // namespace
}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(bulk_probe, deep_ep::device::bulk_probe)
