// The blocks of the low-latency dispatch that post to ranks reached by RDMA. Senders stage the row of a token once for
// all of these ranks; here each warp makes one rank's rows of them, and counts them itself.
#pragma once

#include "kernels/low_latency/dispatch/send.hpp"
#include "kernels/low_latency/transport/rails.hpp"

namespace deep_ep::device {

/// Has `token` an expert on one of `ranks` ranks, of which `rank` is the first?
DEEP_EP_DEVICE bool goes_to(const Routing& routing, int token, int rank, int ranks) {
  const LowLatencyDispatchParams& params = routing.params;
  const std::int64_t first = std::int64_t{rank} * params.num_local_experts;
  const std::int64_t end = first + std::int64_t{ranks} * params.num_local_experts;
  bool goes = false;
  for (int k = 0; k < params.num_topk; ++k) {
    const std::int64_t expert = routing.selection(std::int64_t{token} * params.num_topk + k);
    goes = goes || (expert >= first && expert < end);
  }
  return goes;
}

/// By one warp: all that `peer` gets of this rank in one call.
DEEP_EP_DEVICE void post_rows_to(const LowLatencySender<true>& sender, LowLatencyPoster<kDispatch>& poster, int peer) {
  const LowLatencyDispatchParams& params = sender.params;
  const LowLatencyParams& common = params.common;
  const LowLatencyWindow& window = common.window;
  const LowLatencyStaging& staging = common.rdma.staging;
  const std::uint64_t epoch = sender.epoch();
  const std::uint32_t row_bytes = sender.row.bytes();
  const Rails rails(common);
  const bool relays = rails.used() && rails.is_rail(peer);  // the peer, for its whole node

  // 1. Counts.
  const int cells = params.count_cells;
  auto* staged = reinterpret_cast<Cell*>(common.local + staging.counts_at(epoch, peer));
  for (int cell = lane_index(); cell < cells; cell += kWarpSize) {
    const std::uint32_t relayed = relays ? sender.layout.to_nodes(sender.memory)[rails.node_of(peer)] : 0;
    store_cell(staged + cell, sender.count_payload(peer, cell, relayed), epoch);
  }
  const bool any = poster.put(window.counts_at(epoch, common.rank), staging.counts_at(epoch, peer),
                              static_cast<std::uint32_t>(cells) * sizeof(Cell), lane_index() == 0);
  if (!any || !poster.progress(0)) return;
  poster.flush();

  // 2. Rows, in the order of their slots. By rails those for all ranks of a node to one of them.
  if (rails.used() && !relays) return;
  const int first = relays ? rails.node_of(peer) * rails.width : peer;
  const int ranks = relays ? rails.width : 1;
  int slots = 0;
  for (int begin = 0; begin < params.num_tokens; begin += kWarpSize) {
    const int token = begin + lane_index();
    const bool mine = token < params.num_tokens && goes_to(sender.routing, token, first, ranks);
    const std::uint32_t all = warp::ballot(mine);
    const int slot = slots + count_bits(all & ((1u << lane_index()) - 1));
    const auto* ready =
        reinterpret_cast<const std::uint64_t*>(common.local + staging.dispatch_ready_at(epoch, mine ? token : 0));
    const bool on = poster.post_rows(
        mine, slot + 1,
        [&] {
          const bool there = load_acquire<Scope::gpu>(ready) >= epoch;
          return there ? StagedRow::staged : StagedRow::awaited;
        },
        [&](bool posts) {
          const std::size_t to = relays ? staging.relayed_row_at(kDispatch, epoch, rails.own_node(), slot, row_bytes)
                                        : window.row_at(kDispatch, epoch, common.rank, slot, row_bytes);
          return poster.put(to, staging.dispatch_row_at(epoch, token, row_bytes), row_bytes, posts);
        });
    if (!on) return;
    slots += count_bits(all);
  }
}

/// By whole blocks.
DEEP_EP_DEVICE void post_dispatch(LowLatencySender<true>& sender) {
  const LowLatencyDispatchParams& params = sender.params;
  const LowLatencyParams& common = params.common;
  LowLatencyDispatchShared::Words& words = sender.layout.words(sender.memory);
  const bool sending = sends(params.phase);

  // 1. Which call is this? What goes to whom?
  if (sending) sender.load_counts();
  const Rails rails(common);
  if (sending) sender.clear_counts();
  for (int node = thread_index(); node < rails.num_nodes; node += block_threads()) {
    sender.layout.to_nodes(sender.memory)[node] = 0;
  }
  if (thread_index() == 0) {
    const Epochs before = read_epochs(common, kDispatch);
    words.sent = before.sent;
    words.received = before.received;
  }
  block::sync();
  if (thread_index() == 0) arrive_at_epoch(common, kDispatch, {words.sent, words.received}, params.phase);
  if (sending) sender.routing.count(0, params.num_tokens, sender.other);
  if (sending && rails.used()) sender.routing.count_nodes(rails.width, sender.layout.to_nodes(sender.memory));
  block::sync();

  // 2. Each warp its rank.
  const int peer = rank_of_poster(common);
  if (peer >= common.num_ranks || !is_far(common, peer) || warp::any(masked(common, peer))) return;
  LowLatencyPoster<kDispatch> poster(
      common, set_up_poster(common, LowLatencyChannel::dispatch, peer, sender.layout.poster_words(sender.memory)),
      words.sent + 1);
  const bool told = poster.acknowledge(words.received);
  const auto wait = [&](const std::uint64_t* word, std::uint64_t call) {
    return wait_for_signal(common, word, call, peer, Wanted::low_latency_dispatch_credit);
  };
  if (sending && told && poster.await_credit(wait)) post_rows_to(sender, poster, peer);
  poster.close();
}

}  // namespace deep_ep::device
