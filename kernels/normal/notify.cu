// Notify: ranks exchange how many rows they will send, and every row's final place becomes known. The way of a rank's
// counts:
//
//   1. Its blocks number its tokens for each rank, and between nodes for each node, and stage how many there are: a
//      message for each rank.
//   2. Its last block copies the messages for ranks of its node to these, and puts those for another node to its rail
//      there, whose last block copies them on.
//   3. Every rank's last block adds up what all ranks send to each rank of its node.
//
// Rows lie in a receiver's output by source rank, then by token index at the source. So the place of token t at rank d
// is: the rows that d gets from the ranks before this one, plus this rank's tokens before t that also go to d. The
// second number comes from a scan of the membership. The first one is known in d's node, where dispatch adds it.
//
// Between nodes a source also numbers its tokens for each node: in that order they cross the network.
#include "kernels/common/row_comparison.hpp"
#include "kernels/common/row_copy.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/normal/params.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/rdma/port_channel.hpp"

namespace deep_ep::device::normal {

struct Notify {
  const NotifyParams& params;
  std::int32_t* members;  ///< [warps of the block], shared: tokens that a warp has found
  std::uint64_t epoch;

  const NormalParams& common = params.common;
  const NodeGrid& grid = common.grid;
  const ControlWindow& window = common.control;

  /// A column for each rank, and between nodes one for each node.
  DEEP_EP_DEVICE int columns() const { return grid.num_ranks + (grid.others() == 0 ? 0 : grid.nodes()); }
  DEEP_EP_DEVICE SourceCounts staged_for(int rank) const {
    return window.counts_in(common.own_heap(), window.staged_counts(rank));
  }
  DEEP_EP_DEVICE SourceCounts counts_of(int source) const {
    return window.counts_in(common.own_heap(), window.counts(epoch, source));
  }

  /// By a whole block: numbers our tokens for which `is_member(token)` holds, in their order; -1: it does not. Returns
  /// how many there are.
  template <class IsMember>
  DEEP_EP_DEVICE std::int32_t number(std::int32_t* numbers, int stride, IsMember is_member) const {
    // 1. Each warp counts among tokens that follow each other.
    const int share = align_up((params.num_tokens + block_warps() - 1) / block_warps(), kWarpSize);
    const int begin = warp_index() * share;
    const int end = begin + share < params.num_tokens ? begin + share : params.num_tokens;
    constexpr int kKept = 32;  // answers that a lane keeps for the second pass
    int of_lane = 0;
    std::uint32_t kept = 0;
#pragma unroll 4
    for (int token = begin + lane_index(), turn = 0; token < end; token += kWarpSize, ++turn) {
      const bool member = is_member(token);
      of_lane += member ? 1 : 0;
      if (turn < kKept) kept |= (member ? 1u : 0u) << turn;
    }
    const int count = warp::shuffle(warp::inclusive_sum(of_lane), kWarpSize - 1);
    if (lane_index() == 0) members[warp_index()] = count;
    block::sync();

    // 2. It adds those of the warps and lanes before.
    const int through = warp::inclusive_sum(lane_index() < block_warps() ? members[lane_index()] : 0);
    int before = warp::shuffle(through, warp_index()) - count;
#pragma unroll 1
    for (int first = begin, turn = 0; first < end; first += kWarpSize, ++turn) {
      const int token = first + lane_index();
      const bool member = token < end && (turn < kKept ? (kept >> turn & 1) != 0 : is_member(token));
      const std::uint32_t all = warp::ballot(member), earlier = all & ((1u << lane_index()) - 1);
      if (token < end) numbers[std::int64_t{token} * stride] = member ? before + count_bits(earlier) : -1;
      before += count_bits(all);
    }
    block::sync();  // the next column's counts are written at the same place
    return warp::shuffle(through, kWarpSize - 1);
  }
  /// For the rank or node of a column. A token goes to a node once, however many of its ranks want it.
  DEEP_EP_DEVICE std::int32_t number(int column) const {
    const auto goes_to = [&](int token, int rank) {
      return params.is_token_in_rank[std::int64_t{token} * grid.num_ranks + rank] != 0;
    };
    if (column < grid.num_ranks) {
      return number(params.destination_row + column, grid.num_ranks, [&](int token) { return goes_to(token, column); });
    }
    const int node = column - grid.num_ranks;
    return number(params.node_row + node, grid.nodes(), [&](int token) {
      bool member = false;
#pragma unroll 1
      for (int index = 0; index < grid.width && !member; ++index) member = goes_to(token, node * grid.width + index);
      return member;
    });
  }

  /// By a whole block: stages a column's count for the ranks of its node, and how many selections each expert of the
  /// column's rank has.
  DEEP_EP_DEVICE void stage(int column, std::int32_t count) const {
    const bool of_node = column >= grid.num_ranks;
    const int node = of_node ? column - grid.num_ranks : column / grid.width, first_rank = node * grid.width;
    block::each(grid.width, [&](int index) {
      const SourceCounts to = staged_for(first_rank + index);
      (of_node ? *to.tokens_for_node : to.tokens_per_rank[column - first_rank]) = count;
    });
    if (of_node) {
      if (thread_index() == 0) params.node_counts[node] = count;
      return;
    }
    const SourceCounts to = staged_for(column);
    const std::int32_t* from = params.num_tokens_per_expert + std::int64_t{column} * params.num_local_experts;
    if (thread_index() == 0) *to.shape = params.shape;
    block::each(params.num_local_experts, [&](int expert) { to.tokens_per_expert[expert] = from[expert]; });
  }

  /// By one thread: sends the rail in another node our counts for that node, and waits until they are sent: the next
  /// notify stages its own at the same place.
  DEEP_EP_DEVICE void send_to(int node) const {
    rdma::PortChannel<OneThread> rail(common.queue_pair(InternodeChannel::rows, node), common.wait);
    const auto bytes = static_cast<std::uint32_t>(window.counts_bytes) * static_cast<std::uint32_t>(int{grid.width});
    if (rail.put(window.landed_counts(epoch, grid.first_of_node()).offset,
                 window.staged_counts(node * grid.width).offset, bytes) &&
        rail.signal(window.rail_word(ControlWindow::notified, grid.node()), common.rails[grid.number_of(node)].notified,
                    epoch)) {
      rail.quiet();
    }
    rail.close();
  }
  /// By a whole warp: gives rank `index` of this node our counts, or those of our rail in another node, when they are
  /// here.
  DEEP_EP_DEVICE void deliver(int node, int index) const {
    const int source = grid.rail_in(node), first_rank = node * grid.width;
    if (source != grid.rank) {
      const std::uint64_t* landed = window.rail_word(ControlWindow::notified, node).in(common.own_heap());
      if (!wait_signal<WholeWarp>(common.wait, landed, {source, Wanted::counts, epoch})) return;
      warp::sync();
    }
    std::byte* const heap = common.heaps[grid.first_of_node() + index];
    const Place<std::byte> from = source == grid.rank ? window.staged_counts(first_rank + index)
                                                      : window.landed_counts(epoch, first_rank + index);
    copy_row(window.counts(epoch, source).in(heap), from.in(common.own_heap()),
             static_cast<std::uint32_t>(window.counts_bytes));
    warp::sync();  // the lanes' stores come before the signal
    if (lane_index() == 0) store_release<Scope::system>(window.signal(heap, IntranodeSignal::notify, source), epoch);
  }
  /// By one block, when all counts are staged. The first warps send, the last ones begin to deliver, this rank's own
  /// counts first.
  DEEP_EP_DEVICE void exchange() const {
    block::each(grid.others(), [&](int number) { send_to(grid.other(number)); });
    for (int task = block_warps() - 1 - warp_index(); task < grid.num_ranks; task += block_warps()) {
      deliver(grid.other(task / grid.width - 1), task % grid.width);
    }
  }

  /// Waits until every rank's counts are here. False after a fault. Those of other nodes come by relays of this node,
  /// so this rank waits for the relays; a relay itself reports for which rank it waits.
  DEEP_EP_DEVICE bool await_counts() const {
    bool good = true;
    block::each(grid.num_ranks, [&](int source) {
      const int relay = grid.first_of_node() + source % grid.width;
      good = wait_signal(common.wait, common.signal_from(source, IntranodeSignal::notify),
                         {relay == grid.rank ? source : relay, Wanted::counts, epoch}) &&
             good;
    });
    return block::all(good);
  }

  /// Do all ranks mean the same call? A fault, seen by every rank, if not. Each thread answers for some ranks.
  DEEP_EP_DEVICE bool agree() const {
    bool good = true;
    block::each(grid.num_ranks, [&](int source) {
      const Difference found = difference(params.shape.word, counts_of(source).shape->word);
      if (found.at < 0) return;
      report_fault(common.wait, FaultKind::mismatch, Wanted::counts, source, found.at, found.ours, found.theirs);
      good = false;
    });
    return block::all(good);
  }

  /// Writes the tables that outlive the call, and what the host waits for.
  DEEP_EP_DEVICE void write_tables() const {
    HostCounts* const host = params.host_counts;
    block::each(grid.width, [&](int index) {
      std::int32_t end = 0;
      for (int source = 0; source < grid.num_ranks; ++source) {
        end += counts_of(source).tokens_per_rank[index];
        params.rank_prefix_matrix[source * grid.width + index] = end;
      }
      if (index == grid.index() && host != nullptr) host->num_recv_tokens = end;
    });
    const auto tokens_from = [&](int node) { return *counts_of(grid.rail_in(node)).tokens_for_node; };
    block::each(grid.others(), [&](int number) {
      const int node = grid.other(number);
      params.node_counts[grid.nodes() + node] = tokens_from(node);
    });
    if (host == nullptr) return;
    if (thread_index() == 0) {
      std::int32_t relayed = 0;
      for (int number = 0; number < grid.others(); ++number) relayed += tokens_from(grid.other(number));
      host->num_relay_rows = relayed;
    }
    block::each(params.num_local_experts, [&](int expert) {
      std::int32_t count = 0;
      for (int source = 0; source < grid.num_ranks; ++source) count += counts_of(source).tokens_per_expert[expert];
      host->tokens_per_expert[expert] = align_up(count, params.expert_alignment);
    });
  }
};

DEEP_EP_DEVICE void notify_body(const NotifyParams& params, std::byte* memory) {
  const WaitContext& wait = params.common.wait;
  const Call call = Call::begin(params.common.state->notify, wait);
  const Notify notify{params, reinterpret_cast<std::int32_t*>(memory), call.epoch};

  // 1. The blocks share the columns.
  for (int column = block_index(); call.begun && column < notify.columns(); column += grid_blocks()) {
    notify.stage(column, notify.number(column));
  }
  call.end([&] {
    // After a fault some block may have staged nothing.
    if (!block::all(!aborted(wait))) return;
    // 2. Every block has begun by now: one that begins after a fault takes no part, and ranks would be out of step.
    notify.exchange();
    // 3. All counts are here.
    if (!notify.await_counts() || !notify.agree()) return;
    notify.write_tables();
    block::sync();
    if (thread_index() == 0 && params.host_counts != nullptr) {
      store_release<Scope::system>(&params.host_counts->epoch, call.epoch);
    }
  });
}

}  // namespace deep_ep::device::normal

DEEP_EP_DEFINE_KERNEL(notify, deep_ep::device::normal::notify_body)
