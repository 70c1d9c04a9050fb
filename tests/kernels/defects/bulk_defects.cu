// Mistakes with bulk copies. In each kernel one warp moves rows from source to destination.
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/bulk.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"
#include "tests/kernels/defects/defects.hpp"

namespace deep_ep::device {
namespace {

using defects::kRows;
using defects::kRowWords;
using defects::Params;

constexpr std::uint32_t kRowBytes = kRowWords * sizeof(Vec16);

/// Through a stage that the lanes fill and the engine empties.
DEEP_EP_DEVICE void store_rows(const Params& p, std::byte* shared, bool waits_for_read, bool publishes,
                               bool waits_at_end) {
  auto* stage = reinterpret_cast<Vec16*>(shared);
  for (int row = 0; row < kRows; ++row) {
    if (lane_index() == 0 && waits_for_read) bulk::wait_read<0>();
    warp::sync();
    stage[lane_index()] = p.source[row * kRowWords + lane_index()];
    if (publishes) bulk::publish(stage, kRowBytes);
    warp::sync();
    if (lane_index() == 0) {
      bulk::store(p.destination + row * kRowWords, stage, kRowBytes);
      bulk::commit();
    }
  }
  if (lane_index() == 0 && waits_at_end) bulk::wait<0>();
}

DEEP_EP_DEVICE void stage_reused(const Params& p, std::byte* shared) { store_rows(p, shared, !p.planted, true, true); }
DEEP_EP_DEVICE void missing_publish(const Params& p, std::byte* shared) {
  store_rows(p, shared, true, !p.planted, true);
}
DEEP_EP_DEVICE void exit_without_wait(const Params& p, std::byte* shared) {
  store_rows(p, shared, true, true, !p.planted);
}

/// A barrier that is ready for use, followed by two stages.
struct Pipe {
  Mbarrier& barrier;
  Vec16* stage;
};
DEEP_EP_DEVICE Pipe make_pipe(std::byte* shared) {
  Pipe pipe{*reinterpret_cast<Mbarrier*>(shared), reinterpret_cast<Vec16*>(shared + 128)};
  if (lane_index() == 0) {
    mbarrier::init(pipe.barrier, 1);
    mbarrier::fence_init();
  }
  warp::sync();
  return pipe;
}

/// Planted: every wait is for parity 0, so from the second on it does not wait.
DEEP_EP_DEVICE void parity_not_flipped(const Params& p, std::byte* shared) {
  const Pipe pipe = make_pipe(shared);
  for (int row = 0; row < kRows; ++row) {
    if (lane_index() == 0) {
      mbarrier::arrive_expect_bytes(pipe.barrier, kRowBytes);
      bulk::load(pipe.stage, p.source + row * kRowWords, kRowBytes, pipe.barrier);
    }
    mbarrier::wait(pipe.barrier, p.planted ? 0u : static_cast<std::uint32_t>(row & 1));
    p.destination[row * kRowWords + lane_index()] = pipe.stage[lane_index()];
    warp::sync();
  }
}

/// Planted: two rows arrive, one is expected.
DEEP_EP_DEVICE void wrong_bytes(const Params& p, std::byte* shared) {
  const Pipe pipe = make_pipe(shared);
  for (int row = 0; row < kRows; row += 2) {
    if (lane_index() == 0) {
      mbarrier::arrive_expect_bytes(pipe.barrier, p.planted ? kRowBytes : 2 * kRowBytes);
      for (int i = 0; i < 2; ++i) {
        bulk::load(pipe.stage + i * kRowWords, p.source + (row + i) * kRowWords, kRowBytes, pipe.barrier);
      }
    }
    mbarrier::wait(pipe.barrier, static_cast<std::uint32_t>(row / 2 & 1));
    for (int i = 0; i < 2; ++i) {
      p.destination[(row + i) * kRowWords + lane_index()] = pipe.stage[i * kRowWords + lane_index()];
    }
    warp::sync();
  }
}

/// Planted: the next load begins while lanes still read the stage.
DEEP_EP_DEVICE void load_into_stage_in_use(const Params& p, std::byte* shared) {
  const Pipe pipe = make_pipe(shared);
  for (int row = 0; row < kRows; ++row) {
    if (lane_index() == 0) {
      mbarrier::arrive_expect_bytes(pipe.barrier, kRowBytes);
      bulk::load(pipe.stage, p.source + row * kRowWords, kRowBytes, pipe.barrier);
    }
    mbarrier::wait(pipe.barrier, static_cast<std::uint32_t>(row & 1));
    p.destination[row * kRowWords + lane_index()] = pipe.stage[lane_index()];
    if (!p.planted) warp::sync();
  }
}

}  // namespace
}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(defect_stage_reused, deep_ep::device::stage_reused)
DEEP_EP_DEFINE_KERNEL(defect_missing_publish, deep_ep::device::missing_publish)
DEEP_EP_DEFINE_KERNEL(defect_exit_without_wait, deep_ep::device::exit_without_wait)
DEEP_EP_DEFINE_KERNEL(defect_parity_not_flipped, deep_ep::device::parity_not_flipped)
DEEP_EP_DEFINE_KERNEL(defect_wrong_bytes, deep_ep::device::wrong_bytes)
DEEP_EP_DEFINE_KERNEL(defect_load_into_stage_in_use, deep_ep::device::load_into_stage_in_use)
