// Notify between nodes: ranks exchange how many rows they will send, and every row's final place becomes known. The way
// of a rank's counts:
//
//   1. Its blocks number its tokens for each rank and each node, and count them.
//   2. Its last block copies the counts to the ranks of its node, and puts them to its rail in each other node.
//   3. There the rail's last block copies them to the ranks of that node.
//   4. Every rank adds up the counts of all ranks, which gives its rows their places.
//
// Places of rows are as inside a node (normal/notify.hpp). Besides, a source numbers its tokens for each node: in that
// order they cross the network.
#include "kernels/common/tickets.hpp"
#include "kernels/internode/params.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/normal/notify.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/rdma/port_channel.hpp"

namespace deep_ep::device::internode {

struct Notify {
  const InternodeNotifyParams& params;
  InternodeNotifyShared& shared;
  std::uint64_t epoch;

  DEEP_EP_DEVICE const InternodeParams& common() const { return params.common; }
  DEEP_EP_DEVICE const NodeGrid& grid() const { return params.common.grid; }
  DEEP_EP_DEVICE SourceCounts staged() const {
    return common().window.counts_at(common().window.staged_counts().in(common().own_heap()), grid().num_ranks);
  }
  DEEP_EP_DEVICE SourceCounts counts_of(int source) const {
    return common().window.counts(common().own_heap(), epoch, source);
  }

  DEEP_EP_DEVICE void number_for_rank(int rank) const {
    const std::int32_t count = device::number_for_rank(params, grid().num_ranks, rank, shared.numbering);
    if (thread_index() == 0) staged().tokens_per_rank[rank] = count;
  }
  /// The same for node `node`: a token goes there once, however many of its ranks want it.
  DEEP_EP_DEVICE void number_for_node(int node) const {
    const auto is_member = [&](int token) {
      const std::uint8_t* in_rank =
          params.is_token_in_rank + std::int64_t{token} * grid().num_ranks + node * grid().width;
      bool member = false;
      for (int index = 0; token < params.num_tokens && index < grid().width; ++index) {
        member = member || in_rank[index] != 0;
      }
      return member;
    };
    const int count = number_members(params.num_tokens, shared.numbering, is_member, [&](int token, int number) {
      params.node_row[std::int64_t{token} * grid().nodes() + node] = number;
    });
    if (thread_index() == 0) staged().tokens_per_node[node] = count;
  }

  /// By a whole warp: copies a source's counts to rank `index` of this node, and signals it.
  DEEP_EP_DEVICE void forward_to(const SourceCounts& from, const std::int32_t* experts, int source, int index) const {
    const SourceCounts to = common().window.counts(common().heap_of(index), epoch, source);
    const auto copy = [](auto* into, const auto* out_of, int words) {
      for (int i = lane_index(); i < words; i += kWarpSize) into[i] = load_weak(out_of + i);
    };
    copy(to.shape->word, from.shape->word, CallShape::kWords);
    copy(to.tokens_per_rank, from.tokens_per_rank, grid().num_ranks);
    copy(to.tokens_per_node, from.tokens_per_node, grid().nodes());
    copy(to.tokens_per_expert, experts + index * params.num_local_experts, params.num_local_experts);
    warp::sync();  // the lanes' stores come before the signal
    if (lane_index() == 0) {
      store_release<Scope::system>(common().window.counts_there(common().heap_of(index), source), epoch);
    }
  }

  /// Sends our counts to the rail in node `node`.
  DEEP_EP_DEVICE void send_to(int node) const {
    RailState& rail = common().rails[grid().number_of(node)];
    rdma::PortChannel<OneThread> peer(common().queue_pair(InternodeChannel::rows, node), params.wait);
    const std::size_t from = common().window.staged_counts().offset;
    const std::size_t to = common().window.landed_counts(epoch, grid().node()).offset;
    const std::size_t head_bytes = staged().head_bytes;
    const auto expert_bytes = static_cast<std::uint32_t>(grid().width * params.num_local_experts) * 4;
    bool good = peer.put(to, from, static_cast<std::uint32_t>(head_bytes));
    good = good && peer.put(to + head_bytes,
                            from + head_bytes + std::size_t{expert_bytes} * static_cast<unsigned>(node), expert_bytes);
    good =
        good && peer.signal(common().window.rail_word(InternodeWindow::notified, grid().node()), rail.notified, epoch);
    // The next notify stages its counts at the same place.
    good = good && peer.quiet();
    peer.close();
  }

  /// By a whole warp: waits for the counts of our rail in node `node`, and hands them on.
  DEEP_EP_DEVICE void relay_from(int node) const {
    const int rail = grid().rail_in(node);
    const std::uint64_t* landed = common().window.rail_word(InternodeWindow::notified, node).in(common().own_heap());
    if (!wait_signal<WholeWarp>(params.wait, landed, {rail, Wanted::counts, epoch})) return;
    warp::sync();
    const SourceCounts counts =
        common().window.counts_at(common().window.landed_counts(epoch, node).in(common().own_heap()), grid().width);
    for (int index = 0; index < grid().width; ++index) forward_to(counts, counts.tokens_per_expert, rail, index);
  }

  /// By one block, when all counts are staged.
  DEEP_EP_DEVICE void exchange() const {
    const SourceCounts own = staged();
    const int experts = grid().num_ranks * params.num_local_experts;
    if (thread_index() == 0) {
      *own.shape = params.shape;
      own.shape->word[CallShape::kUnknownExpert] = unknown_expert_to_tell(params);
    }
    for (int i = thread_index(); i < experts; i += block_threads()) {
      own.tokens_per_expert[i] = params.num_tokens_per_expert[i];
    }
    block::sync();
    // A warp for a rank of this node; a warp for a rail, whose first lane posts. Everything is posted, or has its warp,
    // before any warp waits for others.
    for (int index = warp_index(); index < grid().width; index += block_warps()) {
      forward_to(own, own.tokens_per_expert + grid().first_of_node() * params.num_local_experts, grid().rank, index);
    }
    for (int number = warp_index(); number < grid().others(); number += block_warps()) {
      if (lane_index() == 0) send_to(grid().other(number));
      warp::sync();
    }
    for (int number = warp_index(); number < grid().others(); number += block_warps()) {
      relay_from(grid().other(number));
    }
  }

  DEEP_EP_DEVICE const std::uint64_t* counts_there(int source) const {
    return common().window.counts_there(common().own_heap(), source);
  }
  /// Waits until every rank's counts are here. False after a fault. They come by relays of this node, so this rank
  /// waits for the relays; a relay itself reports for which rank it waits.
  DEEP_EP_DEVICE bool await_counts() const {
    bool good = true;
    for (int source = thread_index(); source < grid().num_ranks; source += block_threads()) {
      const int relay = grid().first_of_node() + source % grid().width;
      good = wait_signal(params.wait, counts_there(source),
                         {relay == grid().rank ? source : relay, Wanted::counts, epoch}) &&
             good;
    }
    return whole_block(good, &shared.scratch);
  }

  /// Writes the counts of nodes: for the handle, and for the host.
  DEEP_EP_DEVICE void write_results() const {
    for (int node = thread_index(); node < grid().nodes(); node += block_threads()) {
      params.node_counts[node] = counts_of(grid().rank).tokens_per_node[node];
      params.node_counts[grid().nodes() + node] = counts_of(grid().rail_in(node)).tokens_per_node[grid().node()];
    }
    if (params.host_counts == nullptr || thread_index() != 0) return;
    std::int32_t relayed = 0;
    for (int number = 0; number < grid().others(); ++number) {
      relayed += counts_of(grid().rail_in(grid().other(number))).tokens_per_node[grid().node()];
    }
    params.host_counts->num_relay_rows = relayed;
  }
};

DEEP_EP_DEVICE void notify_body(const InternodeNotifyParams& params, std::byte* memory) {
  auto& shared = *reinterpret_cast<InternodeNotifyShared*>(memory);
  const InternodeParams& common = params.common;
  const NodeGrid& grid = common.grid;
  const Call call = Call::begin(common.state->notify, params.wait, &shared.scratch);
  const Notify notify{params, shared, call.epoch};

  if (call.begun) {
    // 1. Number our tokens for each rank and each node; the blocks share them.
    for (int column = block_index(); column < grid.num_ranks + grid.nodes(); column += grid_blocks()) {
      if (column < grid.num_ranks) {
        notify.number_for_rank(column);
      } else {
        notify.number_for_node(column - grid.num_ranks);
      }
    }

    // 2. The last block exchanges counts, and forwards those of its rails.
    if (last_block_to_arrive(&common.state->notify_ticket, &shared.scratch)) notify.exchange();

    // 3. Add the rows of the ranks before us.
    const bool arrived = notify.await_counts();
    const auto counts_of = [&](int source) { return notify.counts_of(source); };
    const AllCounts counts{params, grid.rank, grid.num_ranks, counts_of};
    for (int rank = block_index(); arrived && rank < grid.num_ranks; rank += grid_blocks())
      counts.add_rows_before(rank);

    // 4. One block writes the tables and wakes the host.
    if (arrived && block_index() == 0) {
      counts.finish(call.epoch, &shared.scratch, [&] { notify.write_results(); });
    }
  }

  call.end([] {});
}

}  // namespace deep_ep::device::internode

DEEP_EP_DEFINE_KERNEL(notify_internode, deep_ep::device::internode::notify_body)
