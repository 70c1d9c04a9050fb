// Notify: ranks exchange how many rows they will send, and every row's final place becomes known. The way of a rank's
// counts:
//
//   1. Its blocks number its tokens for each rank, and between nodes for each node, and count them. Each block stores
//      the counts of its columns in the memory of all ranks of its node, or stages them for another node, and signals.
//   2. Between nodes its last block puts a node's counts to its rail there. The rail's last block copies them to the
//      ranks of that node.
//   3. Every rank adds up what all ranks send to each rank of its node.
//
// Rows lie in a receiver's output by source rank, then by token index at the source. So the place of token t at rank d
// is: the rows that d gets from the ranks before this one, plus this rank's tokens before t that also go to d. The
// second number comes from a scan of the membership. The first one is known in d's node, where dispatch adds it.
//
// Between nodes a source also numbers its tokens for each node: in that order they cross the network.
#include "kernels/common/row_comparison.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/normal/params.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/rdma/port_channel.hpp"

namespace deep_ep::device::normal {

template <bool kRails>
struct Notify {
  const NotifyParams& params;
  std::int32_t* members;  ///< [warps of the block], shared: tokens that a warp has found
  std::uint64_t epoch;

  DEEP_EP_DEVICE const NormalParams& common() const { return params.common; }
  DEEP_EP_DEVICE decltype(auto) grid() const { return grid_of<kRails>(params.common); }
  /// A column for each rank, then for each node.
  DEEP_EP_DEVICE int columns() const { return grid().num_ranks + (kRails ? grid().nodes() : 0); }
  /// What a source's signal is when all its columns are here.
  DEEP_EP_DEVICE std::uint64_t all_columns() const { return epoch * static_cast<std::uint64_t>(columns()); }
  DEEP_EP_DEVICE SourceCounts staged(int node) const {
    return common().control.counts_in(common().own_heap(), common().control.staged_counts(node));
  }
  DEEP_EP_DEVICE SourceCounts counts_of(int source) const {
    return common().control.counts(common().own_heap(), epoch, source);
  }

  /// By a whole block: numbers our tokens for the rank or node of a column, in their order; -1: it does not go there. A
  /// token goes to a node once, however many of its ranks want it. Returns how many there are.
  DEEP_EP_DEVICE std::int32_t number(int column) const {
    constexpr int kTurns = 8;  // tokens that a thread asks about at once, so that their loads are under way
    const int node = column - grid().num_ranks;
    const bool of_node = kRails && node >= 0;
    const int first_rank = of_node ? node * grid().width : column, ranks = of_node ? int{grid().width} : 1;
    std::int32_t* const numbers = of_node ? params.node_row + node : params.destination_row + column;
    const int stride = of_node ? grid().nodes() : grid().num_ranks;
    const auto is_member = [&](int token) {
      const std::uint8_t* in_rank = params.is_token_in_rank + std::int64_t{token} * grid().num_ranks + first_rank;
      bool member = token < params.num_tokens && in_rank[0] != 0;
      for (int index = 1; token < params.num_tokens && index < ranks; ++index) {
        member = member || in_rank[index] != 0;
      }
      return member;
    };
    std::int32_t found = 0;
    for (int first = 0; first < params.num_tokens; first += kTurns * block_threads()) {
      // 1. Each warp counts among tokens that follow each other, in each turn 32 of them.
      const auto token_of = [&](int turn) { return first + (warp_index() * kTurns + turn) * kWarpSize + lane_index(); };
      std::uint32_t asked = 0;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const bool any = token_of(turn) - lane_index() < params.num_tokens;
        asked |= any && is_member(token_of(turn)) ? 1u << turn : 0u;
      }
      const auto members_of = [&](int turn) { return warp::ballot((asked >> turn & 1) != 0); };
      int count = 0;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) count += count_bits(members_of(turn));
      if (lane_index() == 0) members[warp_index()] = count;
      block::sync();

      // 2. It adds those of the warps, turns and lanes before.
      const int through = warp::inclusive_sum(lane_index() < block_warps() ? members[lane_index()] : 0);
      int before = found + warp::shuffle(through, warp_index()) - count;
#pragma unroll
      for (int turn = 0; turn < kTurns; ++turn) {
        const std::uint32_t earlier = members_of(turn) & ((1u << lane_index()) - 1);
        const bool member = (asked >> turn & 1) != 0;
        if (token_of(turn) < params.num_tokens) {
          numbers[std::int64_t{token_of(turn)} * stride] = member ? before + count_bits(earlier) : -1;
        }
        before += count_bits(members_of(turn));
      }
      found += warp::shuffle(through, kWarpSize - 1);
      block::sync();  // the next turns write the counts again
    }
    return found;
  }

  /// By a whole block: `with(counts)` for our counts at each rank of this node.
  template <class With>
  DEEP_EP_DEVICE void at_each_rank(With with) const {
    block::each(grid().width, [&](int index) {
      with(common().control.counts(common().heaps[grid().first_of_node() + index], epoch, grid().rank));
    });
  }
  /// By a whole block: stores a column's count, and how many selections each expert of the column's rank has, where
  /// ranks of this node read them, or where the NIC fetches them.
  DEEP_EP_DEVICE void publish(int column, std::int32_t count) const {
    if (column == 0) {
      at_each_rank([&](const SourceCounts& to) { *to.shape = params.shape; });
    }
    if (kRails && column >= grid().num_ranks) {
      const int node = column - grid().num_ranks;
      if (thread_index() == 0) *staged(node).tokens_for_node = params.node_counts[node] = count;
    } else {
      const int node = kRails ? column / grid().width : 0;
      const int index = column - node * grid().width;
      const bool here = node == grid().node();
      if (here) {
        at_each_rank([&](const SourceCounts& to) { to.tokens_per_rank[index] = count; });
      } else if (thread_index() == 0) {
        staged(node).tokens_per_rank[index] = count;
      }
      const std::int32_t* from = params.num_tokens_per_expert + std::int64_t{column} * params.num_local_experts;
      std::int32_t* const to =
          here ? common().control.counts(common().heaps[column], epoch, grid().rank).tokens_per_expert
               : staged(node).tokens_per_expert + index * params.num_local_experts;
      block::each(params.num_local_experts, [&](int expert) { to[expert] = from[expert]; });
    }
    block::sync();
    for (int peer = thread_index(); peer < grid().width; peer += block_threads()) {
      add_release<Scope::system>(common().signal_to(grid().first_of_node() + peer, IntranodeSignal::notify),
                                 std::uint64_t{1});
    }
  }

  /// By a whole warp.
  template <class Word>
  DEEP_EP_DEVICE static void copy(Word* to, const Word* from, int words) {
    for (int i = lane_index(); i < words; i += kWarpSize) to[i] = load_weak(from + i);
  }
  using Peer = rdma::PortChannel<OneThread>;
  /// The rail in node `node`, for one thread.
  DEEP_EP_DEVICE Peer peer_in(int node) const {
    return {common().queue_pair(InternodeChannel::rows, node), common().wait};
  }
  /// By a whole warp: sends our counts for node `node` to the rail there.
  DEEP_EP_DEVICE void send_to(int node) const {
    const SourceCounts to = staged(node);
    copy(to.shape->word, counts_of(grid().rank).shape->word, CallShape::kWords);
    warp::sync();  // the lanes' stores come before the write
    if (lane_index() != 0) return;
    RailState& rail = common().rails[grid().number_of(node)];
    const ControlWindow& window = common().control;
    Peer peer = peer_in(node);
    const auto* const end =
        reinterpret_cast<std::byte*>(to.tokens_per_expert + grid().width * params.num_local_experts);
    const auto bytes = static_cast<std::uint32_t>(end - reinterpret_cast<std::byte*>(to.shape));
    bool good = peer.put(window.landed_counts(epoch, grid().node()).offset, window.staged_counts(node).offset, bytes);
    if (good) peer.signal(window.rail_word(ControlWindow::notified, grid().node()), rail.notified, epoch);
    peer.close();
  }
  /// By a whole warp: waits for the counts of our rail in node `node`, and copies them to the ranks of this node.
  DEEP_EP_DEVICE void relay_from(int node) const {
    const int rail = grid().rail_in(node);
    const std::uint64_t* landed = common().control.rail_word(ControlWindow::notified, node).in(common().own_heap());
    if (!wait_signal<WholeWarp>(common().wait, landed, {rail, Wanted::counts, epoch})) return;
    warp::sync();
    const SourceCounts from =
        common().control.counts_in(common().own_heap(), common().control.landed_counts(epoch, node));
    for (int index = 0; index < grid().width; ++index) {
      std::byte* heap = common().heaps[grid().first_of_node() + index];
      const SourceCounts to = common().control.counts(heap, epoch, rail);
      copy(to.shape->word, from.shape->word, CallShape::kWords);
      copy(to.tokens_for_node, from.tokens_for_node, 1);
      copy(to.tokens_per_rank, from.tokens_per_rank, grid().width);
      copy(to.tokens_per_expert, from.tokens_per_expert + index * params.num_local_experts, params.num_local_experts);
      warp::sync();  // the lanes' stores come before the signal
      if (lane_index() == 0) {
        store_release<Scope::system>(common().control.signal(heap, IntranodeSignal::notify, rail), all_columns());
      }
    }
  }
  /// By one thread: waits until our counts for node `node` are sent. The next notify stages its own at the same place.
  DEEP_EP_DEVICE void await_sent(int node) const {
    Peer peer = peer_in(node);
    peer.quiet();
    peer.close();
  }
  /// By one block, when all counts are staged: a warp for a rail. Everything is posted before any warp waits for
  /// others. A warp relays before it waits for what was posted, if no other warp does that meanwhile.
  DEEP_EP_DEVICE void exchange() const {
    const int others = grid().others();
    for (int number = warp_index(); number < others; number += block_warps()) send_to(grid().other(number));
    block::sync();
    for (int task = warp_index(); task < 2 * others; task += block_warps()) {
      if (task < others) {
        relay_from(grid().other(task));
      } else if (lane_index() == 0) {
        await_sent(grid().other(task - others));
      }
    }
  }

  /// Waits until every rank's counts are here. False after a fault. Those of other nodes come by relays of this node,
  /// so this rank waits for the relays; a relay itself reports for which rank it waits.
  DEEP_EP_DEVICE bool await_counts() const {
    bool good = true;
    for (int source = thread_index(); source < grid().num_ranks; source += block_threads()) {
      int speaker = source;
      if constexpr (kRails) {
        const int relay = grid().first_of_node() + source % grid().width;
        if (relay != grid().rank) speaker = relay;
      }
      good = wait_signal(common().wait, common().signal_from(source, IntranodeSignal::notify),
                         {speaker, Wanted::counts, all_columns()}) &&
             good;
    }
    return block::all(good);
  }

  /// Do all ranks mean the same call? A fault, seen by every rank, if not. Each thread answers for some ranks. Every
  /// block has begun by then: one that begins after a fault takes no part, and ranks would no longer be in step.
  DEEP_EP_DEVICE bool agree() const {
    bool good = true;
    for (int source = thread_index(); source < grid().num_ranks; source += block_threads()) {
      const Difference found = difference(params.shape.word, counts_of(source).shape->word);
      if (found.at < 0) continue;
      report_fault(common().wait, FaultKind::mismatch, Wanted::counts, source, found.at, found.ours, found.theirs);
      good = false;
    }
    return good;
  }

  /// By one block: writes the tables that outlive the call, and what the host waits for.
  DEEP_EP_DEVICE void write_tables() const {
    for (int index = thread_index(); index < grid().width; index += block_threads()) {
      std::int32_t end = 0;
      for (int source = 0; source < grid().num_ranks; ++source) {
        end += counts_of(source).tokens_per_rank[index];
        params.rank_prefix_matrix[source * grid().width + index] = end;
      }
      if (index == grid().index() && params.host_counts != nullptr) params.host_counts->num_recv_tokens = end;
    }
    if (params.host_counts == nullptr) return;
    for (int expert = thread_index(); expert < params.num_local_experts; expert += block_threads()) {
      std::int32_t count = 0;
      for (int source = 0; source < grid().num_ranks; ++source) count += counts_of(source).tokens_per_expert[expert];
      params.host_counts->tokens_per_expert[expert] = align_up(count, params.expert_alignment);
    }
  }

  /// Writes how many rows come from each node: for the handle, and for the host.
  DEEP_EP_DEVICE void write_counts_of_nodes() const {
    const auto tokens_from = [&](int node) { return *counts_of(grid().rail_in(node)).tokens_for_node; };
    for (int number = thread_index(); number < grid().others(); number += block_threads()) {
      const int node = grid().other(number);
      params.node_counts[grid().nodes() + node] = tokens_from(node);
    }
    if (params.host_counts == nullptr || thread_index() != 0) return;
    std::int32_t relayed = 0;
    for (int number = 0; number < grid().others(); ++number) relayed += tokens_from(grid().other(number));
    params.host_counts->num_relay_rows = relayed;
  }
};

template <bool kRails>
DEEP_EP_DEVICE void notify_body(const NotifyParams& params, std::byte* memory) {
  const NormalParams& common = params.common;
  const Call call = Call::begin(common.state->notify, common.wait);
  const Notify<kRails> notify{params, reinterpret_cast<std::int32_t*>(memory), call.epoch};

  if (call.begun) {
    // 1. Number our tokens for each rank and each node; the blocks share them. Publish how many there are.
    for (int column = block_index(); column < notify.columns(); column += grid_blocks()) {
      notify.publish(column, notify.number(column));
    }

    // 2. Between nodes the last block exchanges counts with the rails.
    if constexpr (kRails) {
      if (last_block_to_arrive(&common.state->ticket)) notify.exchange();
    }

    // 3. One block waits for all counts, writes the tables and wakes the host.
    if (block_index() == 0 && notify.await_counts()) {
      if (block::all(notify.agree())) {
        notify.write_tables();
        if constexpr (kRails) notify.write_counts_of_nodes();
      }
      block::sync();
      if (thread_index() == 0 && params.host_counts != nullptr) {
        store_release<Scope::system>(&params.host_counts->epoch, call.epoch);
      }
    }
  }

  call.end([] {});
}

}  // namespace deep_ep::device::normal

DEEP_EP_DEFINE_KERNEL(notify, deep_ep::device::normal::notify_body<false>)
DEEP_EP_DEFINE_KERNEL(notify_internode, deep_ep::device::normal::notify_body<true>)
