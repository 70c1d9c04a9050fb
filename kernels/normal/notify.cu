// Notify: ranks exchange how many rows they will send, and every row's final place becomes known. The way of a rank's
// counts:
//
//   1. Its blocks number its tokens for each rank, and between nodes for each node, and count them. Each block stores
//      the counts of its columns in the memory of all ranks of its node, and signals.
//   2. Between nodes its last block puts the counts to its rail in each other node. There the rail's last block copies
//      them to the ranks of that node.
//   3. Every rank adds up the counts of all ranks, which gives its rows their places.
//
// Rows lie in a receiver's output by source rank, then by token index at the source. So the place of token t at rank d
// is: the rows that d gets from the ranks before this one, plus this rank's tokens before t that also go to d. The
// first number comes from the other ranks' counts, the second from a scan of the membership.
//
// Between nodes a source also numbers its tokens for each node: in that order they cross the network.
#include "kernels/common/numbering.hpp"
#include "kernels/common/row_comparison.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/normal/params.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/rdma/port_channel.hpp"

namespace deep_ep::device::normal {

template <bool kRails>
struct Notify {
  const NotifyParams& params;
  NotifyShared& shared;
  std::uint64_t epoch;

  DEEP_EP_DEVICE const NormalParams& common() const { return params.common; }
  DEEP_EP_DEVICE decltype(auto) grid() const { return grid_of<kRails>(params.common); }
  /// A column for each rank, then for each node.
  DEEP_EP_DEVICE int columns() const { return grid().num_ranks + (kRails ? grid().nodes() : 0); }
  /// What a source's signal is when all its columns are here.
  DEEP_EP_DEVICE std::uint64_t all_columns() const { return epoch * static_cast<std::uint64_t>(columns()); }
  DEEP_EP_DEVICE SourceCounts staged() const {
    return common().control.counts_at(Carver(common().window.staged_counts().in(common().own_heap())),
                                      grid().num_ranks);
  }
  DEEP_EP_DEVICE SourceCounts counts_of(int source) const {
    return common().control.counts(common().own_heap(), epoch, source);
  }

  /// By a whole block: numbers our tokens for rank `destination`, in their order. Returns how many there are; -1 if the
  /// caller has counted otherwise, which travels in place of the count, so that all ranks know.
  DEEP_EP_DEVICE std::int32_t number_for_rank(int destination) const {
    const auto at = [&](int token) { return std::int64_t{token} * grid().num_ranks + destination; };
    const int count = number_members(
        params.num_tokens, shared.numbering,
        [&](int token) { return token < params.num_tokens && params.is_token_in_rank[at(token)] != 0; },
        [&](int token, int number) { params.destination_row[at(token)] = number; });
    return count == params.num_tokens_per_rank[destination] ? count : -1;
  }
  /// By a whole block: numbers our tokens for node `node`. A token goes there once, however many of its ranks want it.
  DEEP_EP_DEVICE std::int32_t number_for_node(int node) const {
    const auto is_member = [&](int token) {
      const std::uint8_t* in_rank =
          params.is_token_in_rank + std::int64_t{token} * grid().num_ranks + node * grid().width;
      bool member = false;
      for (int index = 0; token < params.num_tokens && index < grid().width; ++index) {
        member = member || in_rank[index] != 0;
      }
      return member;
    };
    return number_members(params.num_tokens, shared.numbering, is_member, [&](int token, int number) {
      params.node_row[std::int64_t{token} * grid().nodes() + node] = number;
    });
  }
  DEEP_EP_DEVICE std::int32_t number(int column) const {
    if constexpr (kRails) {
      if (column >= grid().num_ranks) return number_for_node(column - grid().num_ranks);
    }
    return number_for_rank(column);
  }

  /// By one thread.
  DEEP_EP_DEVICE void store_count(const SourceCounts& to, int column, std::int32_t count) const {
    if (!kRails || column < grid().num_ranks) {
      to.tokens_per_rank[column] = count;
    } else {
      to.tokens_per_node[column - grid().num_ranks] = count;
    }
    if (column == 0) *to.shape = params.shape;
  }
  /// By a whole block: stores a column's count, and how many selections each expert of the column's rank has, where
  /// other ranks read them or NICs fetch them.
  DEEP_EP_DEVICE void publish(int column, std::int32_t count) const {
    const auto counts_at = [&](int index) {
      return common().control.counts(common().heaps[grid().first_of_node() + index], epoch, grid().rank);
    };
#pragma unroll 1
    for (int index = thread_index(); index < grid().width; index += block_threads()) {
      store_count(counts_at(index), column, count);
    }
    if (kRails && thread_index() == 0) store_count(staged(), column, count);
    if (!kRails || column < grid().num_ranks) {
      const std::int32_t* experts = params.num_tokens_per_expert + std::int64_t{column} * params.num_local_experts;
      const int index = column - grid().first_of_node();
      const bool here = !kRails || (index >= 0 && index < grid().width);
      std::int32_t* const to = here ? counts_at(index).tokens_per_expert : nullptr;
      std::int32_t* const also_to = kRails ? staged().tokens_per_expert + column * params.num_local_experts : nullptr;
#pragma unroll 1
      for (int expert = thread_index(); expert < params.num_local_experts; expert += block_threads()) {
        if (here) to[expert] = experts[expert];
        if (kRails) also_to[expert] = experts[expert];
      }
    }
    block::sync();
    for (int peer = thread_index(); peer < grid().width; peer += block_threads()) {
      fetch_add_release<Scope::system>(common().signal_to(grid().first_of_node() + peer, IntranodeSignal::notify),
                                       std::uint64_t{1});
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
    good = good && peer.signal(common().window.rail_word(RailWindow::notified, grid().node()), rail.notified, epoch);
    // The next notify stages its counts at the same place.
    good = good && peer.quiet();
    peer.close();
  }
  /// By a whole warp: waits for the counts of our rail in node `node`, and copies them to the ranks of this node.
  DEEP_EP_DEVICE void relay_from(int node) const {
    const int rail = grid().rail_in(node);
    const std::uint64_t* landed = common().window.rail_word(RailWindow::notified, node).in(common().own_heap());
    if (!wait_signal<WholeWarp>(params.wait, landed, {rail, Wanted::counts, epoch})) return;
    warp::sync();
    const SourceCounts from = common().control.counts_at(
        Carver(common().window.landed_counts(epoch, node).in(common().own_heap())), grid().width);
    const auto copy = [](auto* into, const auto* out_of, int words) {
      for (int i = lane_index(); i < words; i += kWarpSize) into[i] = load_weak(out_of + i);
    };
    for (int index = 0; index < grid().width; ++index) {
      std::byte* heap = common().heaps[grid().first_of_node() + index];
      const SourceCounts to = common().control.counts(heap, epoch, rail);
      copy(to.shape->word, from.shape->word, CallShape::kWords);
      copy(to.tokens_per_rank, from.tokens_per_rank, grid().num_ranks);
      copy(to.tokens_per_node, from.tokens_per_node, grid().nodes());
      copy(to.tokens_per_expert, from.tokens_per_expert + index * params.num_local_experts, params.num_local_experts);
      warp::sync();  // the lanes' stores come before the signal
      if (lane_index() == 0) {
        store_release<Scope::system>(common().control.signal(heap, IntranodeSignal::notify, rail), all_columns());
      }
    }
  }
  /// By one block, when all counts are staged: a warp for a rail, whose first lane posts. Everything is posted, or has
  /// its warp, before any warp waits for others.
  DEEP_EP_DEVICE void exchange() const {
    for (int number = warp_index(); number < grid().others(); number += block_warps()) {
      if (lane_index() == 0) send_to(grid().other(number));
      warp::sync();
    }
    for (int number = warp_index(); number < grid().others(); number += block_warps()) {
      relay_from(grid().other(number));
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
      good = wait_signal(params.wait, common().signal_from(source, IntranodeSignal::notify),
                         {speaker, Wanted::counts, all_columns()}) &&
             good;
    }
    return whole_block(good, &shared.scratch);
  }

  /// By a whole block: adds the rows of the ranks before this one. Each thread meets the tokens that it numbered
  /// itself.
  DEEP_EP_DEVICE void add_rows_before(int destination) const {
    std::int32_t first_row = 0;
    for (int source = 0; source < grid().rank; ++source) first_row += counts_of(source).tokens_per_rank[destination];
    if (first_row == 0) return;
    constexpr int kTogether = 8;  // loads under way at once
    for (int first = thread_index(); first < params.num_tokens; first += kTogether * block_threads()) {
      std::int32_t* const rows = params.destination_row + destination;
      const auto at = [&](int i) { return std::int64_t{first + i * block_threads()} * grid().num_ranks; };
      std::int32_t row[kTogether];
      for (int i = 0; i < kTogether; ++i) row[i] = first + i * block_threads() < params.num_tokens ? rows[at(i)] : -1;
      for (int i = 0; i < kTogether; ++i) {
        if (row[i] >= 0) rows[at(i)] = row[i] + first_row;
      }
    }
  }

  /// Do all ranks mean the same call, and do their counts make sense? A fault, seen by every rank, if not. Each thread
  /// answers for some ranks.
  DEEP_EP_DEVICE bool agree() const {
    bool good = true;
    for (int source = thread_index(); source < grid().num_ranks; source += block_threads()) {
      const SourceCounts counts = counts_of(source);
      good = agrees_on_call(params, *counts.shape, source) && good;
      for (int to = 0; to < grid().num_ranks; ++to) {
        if (counts.tokens_per_rank[to] >= 0) continue;
        report_fault(params.wait, FaultKind::inconsistent_counts, Wanted::counts, source, to, 0, 0);
        good = false;
        break;
      }
    }
    return good;
  }

  /// By one block: writes the tables that outlive the call, and what the host waits for.
  DEEP_EP_DEVICE void write_tables() const {
    for (int to = thread_index(); to < grid().num_ranks; to += block_threads()) {
      std::int32_t end = 0;
      for (int source = 0; source < grid().num_ranks; ++source) {
        end += counts_of(source).tokens_per_rank[to];
        params.rank_prefix_matrix[source * grid().num_ranks + to] = end;
      }
      if (to == grid().rank && params.host_counts != nullptr) params.host_counts->num_recv_tokens = end;
    }
    if (params.host_counts == nullptr) return;
    for (int expert = thread_index(); expert < params.num_local_experts; expert += block_threads()) {
      std::int32_t count = 0;
      for (int source = 0; source < grid().num_ranks; ++source) count += counts_of(source).tokens_per_expert[expert];
      const std::int32_t alignment = params.expert_alignment;
      params.host_counts->tokens_per_expert[expert] = (count + alignment - 1) / alignment * alignment;
    }
  }

  /// Writes the counts of nodes: for the handle, and for the host.
  DEEP_EP_DEVICE void write_counts_of_nodes() const {
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

template <bool kRails>
DEEP_EP_DEVICE void notify_body(const NotifyParams& params, std::byte* memory) {
  auto& shared = *reinterpret_cast<NotifyShared*>(memory);
  const NormalParams& common = params.common;
  const Call call = Call::begin(common.state->notify, params.wait, &shared.scratch);
  const Notify<kRails> notify{params, shared, call.epoch};

  if (call.begun) {
    // 1. Number our tokens for each rank and each node; the blocks share them. Publish how many there are.
    for (int column = block_index(); column < notify.columns(); column += grid_blocks()) {
      notify.publish(column, notify.number(column));
    }

    // 2. Between nodes the last block exchanges counts with the rails.
    if constexpr (kRails) {
      if (last_block_to_arrive(&common.state->notify_ticket, &shared.scratch)) notify.exchange();
    }

    // 3. Add the rows of the ranks before us.
    const bool arrived = notify.await_counts();
    for (int rank = block_index(); arrived && rank < common.num_ranks; rank += grid_blocks()) {
      notify.add_rows_before(rank);
    }

    // 4. One block writes the tables and wakes the host.
    if (arrived && block_index() == 0) {
      if (whole_block(notify.agree(), &shared.scratch)) {
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
