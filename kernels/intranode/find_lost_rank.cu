// Who is lost, within a node? After a call that has waited in vain: whoever was waited for may itself wait for another
// rank. At the end of a combine, say, a rank waits for every other's word that its rows have been read, and one that
// still waits for rows of a lost rank gives that word as little as the lost rank does.
//
// Every rank that has waited in vain tells all others for whom. Whoever is waited for and tells nothing is lost. Nobody
// knows whether a rank will still tell something, so this takes the whole time that it is given.
#include "kernels/common/lost_rank.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/intranode/params.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

/// By one warp.
DEEP_EP_DEVICE void find_lost_rank_body(const LostRankParams& params, std::byte*) {
  const IntranodeParams& common = params.common;
  const std::uint64_t begin = now_ns();

  // 1. Tell for whom we have waited.
  for (int peer = lane_index(); peer < common.num_ranks; peer += kWarpSize) {
    store_release<Scope::system>(common.signal_to(peer, IntranodeSignal::lost_rank),
                                 told_wait(params.waited_for, params.cut_off_from));
  }

  // 2. Give the others time to do the same.
  poll_until([](Poll&) { return false; }, [&](const Poll&) { return warp::any(now_ns() - begin > params.for_ns); });

  // 3. Who is at the end?
  if (lane_index() != 0) return;
  const int lost = end_of_waits(common.rank, params.waited_for, common.num_ranks, [&](int rank) {
    return load_acquire<Scope::system>(common.signal_from(rank, IntranodeSignal::lost_rank));
  });
  store_release<Scope::system>(params.lost, lost);
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(find_lost_rank, deep_ep::device::find_lost_rank_body)
