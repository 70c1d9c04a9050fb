// Who is lost? After a call that has waited in vain: whoever was waited for may itself wait for another rank. A relay
// waits for the ranks of its node, so where one of these is lost, ranks of other nodes see a relay that is late.
//
// Every rank that has waited in vain says for whom: it tells its node, and each rank tells its rails what it knows of
// its node, so everybody hears of everybody. Whoever is waited for and tells nothing is lost. Nobody knows whether a
// rank will still tell something, so this takes the whole time that it is given.
#include "kernels/common/lost_rank.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/internode/params.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/warp.hpp"
#include "kernels/rdma/peer.hpp"

namespace deep_ep::device::internode {

/// By one warp.
struct LostRankSearch {
  const InternodeLostRankParams& params;
  std::uint64_t* passed_on;  ///< [width]: what the rails know of this node's ranks

  DEEP_EP_DEVICE const InternodeParams& common() const { return params.common; }
  DEEP_EP_DEVICE const NodeGrid& grid() const { return params.common.grid; }
  /// What is known of a rank here: for whom it has waited, plus one, or 0.
  DEEP_EP_DEVICE std::uint64_t told_by(int rank) const {
    return load_acquire<Scope::system>(common().window.lost(rank).in(common().own_heap()));
  }

  DEEP_EP_DEVICE void tell_node() const {
    const Place<std::uint64_t> word = common().window.lost(grid().rank);
    for (int index = lane_index(); index < grid().width; index += kWarpSize) {
      store_release<Scope::system>(word.in(common().heap_of(index)), static_cast<std::uint64_t>(params.waited_for) + 1);
    }
  }
  DEEP_EP_DEVICE bool is_news() const {
    bool news = false;
    for (int index = lane_index(); index < grid().width; index += kWarpSize) {
      news = news || told_by(grid().first_of_node() + index) != passed_on[index];
    }
    return warp::any(news);
  }
  DEEP_EP_DEVICE void tell_rails() const {
    for (int index = 0; index < grid().width; ++index) {
      const int rank = grid().first_of_node() + index;
      const std::uint64_t told = warp::shuffle(lane_index() == 0 ? told_by(rank) : std::uint64_t{0}, 0);
      const std::uint64_t known = passed_on[index];
      warp::sync();
      if (told == known) continue;
      if (lane_index() == 0) passed_on[index] = told;
      for (int number = lane_index(); number < grid().others(); number += kWarpSize) {
        rdma::RdmaPeer<OneThread> rail(common().queue_pair(InternodeChannel::credit, grid().other(number)),
                                       params.wait);
        rail.signal_add(common().window.lost(rank).offset, told - known);
        rail.close();
      }
      warp::sync();
    }
  }

  /// By one lane.
  DEEP_EP_DEVICE int lost() const {
    return end_of_waits(params.waited_for, grid().num_ranks, [&](int rank) { return told_by(rank); });
  }
};

DEEP_EP_DEVICE void find_lost_rank_body(const InternodeLostRankParams& params, std::byte* memory) {
  const LostRankSearch search{params, reinterpret_cast<std::uint64_t*>(memory)};
  for (int index = lane_index(); index < params.common.grid.width; index += kWarpSize) search.passed_on[index] = 0;
  const std::uint64_t begin = now_ns();
  search.tell_node();
  warp::sync();
  while (poll_until([&](Poll&) { return search.is_news(); },
                    [&](const Poll&) { return warp::any(now_ns() - begin > params.for_ns); })) {
    search.tell_rails();
  }
  if (lane_index() == 0) store_release<Scope::system>(params.lost, search.lost());
}

}  // namespace deep_ep::device::internode

DEEP_EP_DEFINE_KERNEL(find_lost_rank_internode, deep_ep::device::internode::find_lost_rank_body)
