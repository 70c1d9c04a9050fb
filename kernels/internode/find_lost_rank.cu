// Who is lost? After a call that has waited in vain: whoever was waited for may itself wait for another rank. A relay
// waits for the ranks of its node, so where one of these is lost, ranks of other nodes see a relay that is late.
//
// Every rank that has waited in vain says for whom: it tells its node, each rank tells its rails what it knows of its
// node, and its node what rails have told it: the lost rank is itself somebody's rail and tells them nothing. So
// everybody hears of everybody. Whoever is waited for and tells nothing is lost. Nobody knows whether a rank will still
// tell something, so this takes the whole time that it is given.
#include "kernels/common/lost_rank.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/internode/params.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/warp.hpp"
#include "kernels/rdma/port_channel.hpp"

namespace deep_ep::device::internode {

/// By one warp.
struct LostRankSearch {
  const InternodeLostRankParams& params;
  std::uint64_t* passed_on;  ///< [num_ranks]: what has been passed on of each rank

  DEEP_EP_DEVICE const InternodeParams& common() const { return params.common; }
  DEEP_EP_DEVICE const NodeGrid& grid() const { return params.common.grid; }
  DEEP_EP_DEVICE std::uint64_t at(Place<std::uint64_t> word) const {
    return load_acquire<Scope::system>(word.in(common().own_heap()));
  }
  /// What is known of a rank here: for whom it has waited, plus one, or 0.
  DEEP_EP_DEVICE std::uint64_t told_by(int rank) const {
    const std::uint64_t near = at(common().window.lost(rank));
    return near != 0 ? near : at(common().window.lost_by_rail(rank));
  }

  DEEP_EP_DEVICE void tell_node(int teller, std::uint64_t told) const {
    const Place<std::uint64_t> word = common().window.lost(teller);
    for (int index = lane_index(); index < grid().width; index += kWarpSize) {
      store_release<Scope::system>(word.in(common().heap_of(index)), told);
    }
  }
  DEEP_EP_DEVICE void tell_rails(int teller, std::uint64_t told) const {
    for (int number = lane_index(); number < grid().others(); number += kWarpSize) {
      rdma::PortChannel<OneThread> rail(common().queue_pair(InternodeChannel::credit, grid().other(number)),
                                        params.wait);
      rail.signal_add(common().window.lost_by_rail(teller).offset, told);
      rail.close();
    }
  }

  DEEP_EP_DEVICE bool is_news() const {
    bool news = false;
    for (int rank = lane_index(); rank < grid().num_ranks; rank += kWarpSize) {
      news = news || told_by(rank) != passed_on[rank];
    }
    return warp::any(news);
  }
  /// A rank says a thing once, so what is known of it changes once.
  DEEP_EP_DEVICE void pass_on() const {
    for (int rank = 0; rank < grid().num_ranks; ++rank) {
      const std::uint64_t told = warp::shuffle(lane_index() == 0 ? told_by(rank) : std::uint64_t{0}, 0);
      const std::uint64_t known = passed_on[rank];
      warp::sync();
      if (told == known) continue;
      if (lane_index() == 0) passed_on[rank] = told;
      const bool is_near = rank >= grid().first_of_node() && rank < grid().first_of_node() + grid().width;
      if (is_near) {
        tell_rails(rank, told);
      } else {
        tell_node(rank, told);
      }
      warp::sync();
    }
  }

  /// By one lane.
  DEEP_EP_DEVICE int lost() const {
    return end_of_waits(grid().rank, params.waited_for, grid().num_ranks, [&](int rank) { return told_by(rank); });
  }
};

DEEP_EP_DEVICE void find_lost_rank_body(const InternodeLostRankParams& params, std::byte* memory) {
  const LostRankSearch search{params, reinterpret_cast<std::uint64_t*>(memory)};
  const NodeGrid& grid = params.common.grid;
  const std::uint64_t begin = now_ns();

  // 1. Nothing is known yet; but for whom this rank has waited.
  for (int rank = lane_index(); rank < grid.num_ranks; rank += kWarpSize) search.passed_on[rank] = 0;
  search.tell_node(grid.rank, told_wait(params.waited_for, params.cut_off_from));
  warp::sync();

  // 2. Hear what the others say, and pass it on.
  while (poll_until([&](Poll&) { return search.is_news(); },
                    [&](const Poll&) { return warp::any(now_ns() - begin > params.for_ns); })) {
    search.pass_on();
  }

  // 3. Who is at the end?
  if (lane_index() == 0) store_release<Scope::system>(params.lost, search.lost());
}

}  // namespace deep_ep::device::internode

DEEP_EP_DEFINE_KERNEL(find_lost_rank_internode, deep_ep::device::internode::find_lost_rank_body)
