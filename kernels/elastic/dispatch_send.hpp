// The sending warps of the second interface's dispatch. Each takes a token, loads its row once into shared memory by a
// bulk copy, and stores it by bulk copies to the token's place at each other rank that has one of its experts. The next
// row loads meanwhile. Scales and weights go to their places at this rank, too.
#pragma once

#include "kernels/common/row_copy.hpp"
#include "kernels/common/row_pipe.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/elastic/params.hpp"

namespace deep_ep::device {

struct ElasticSender {
  const ElasticDispatchParams& params;
  RowPipe pipe;

  /// Does this block send?
  DEEP_EP_DEVICE bool sends() const {
    const int block = block_index() - params.first_sender;
    return block >= 0 && block < params.sending_blocks;
  }

  struct Unit {
    std::int32_t token = 0;
    int to = -1;  ///< the rank that has the expert of the lane's selection, in the first lane of each such rank
    const std::byte* row = nullptr;  ///< if it travels to another rank
  };

  Turns turns{};  ///< tokens of the pass, counted from its first one
  Unit ahead{};   ///< what is sent first

  /// The token whose turn it is; behind the last one a row that does not travel.
  DEEP_EP_DEVICE Unit unit_of(std::uint32_t turn) const {
    Unit unit;
    if (turn >= turns.end) return unit;
    unit.token = params.window.first_token + static_cast<std::int32_t>(turn);
    const std::int64_t at = std::int64_t{unit.token} * params.rows.num_topk + lane_index();
    const std::int64_t index = lane_index() < params.rows.num_topk ? params.topk_idx.load_cached(at) : -1;
    const int expert = expert_of(index, params.num_local_experts * params.common.num_ranks);
    const int owner = expert < 0 ? -1 : expert / params.num_local_experts;
    const std::uint32_t same = warp::match_any(static_cast<std::uint32_t>(owner));
    if (lowest_bit(same) == lane_index()) unit.to = owner;
    const bool travels = warp::any(unit.to >= 0 && unit.to != params.common.rank);
    if (travels) unit.row = params.x + std::int64_t{unit.token} * params.rows.row_bytes;
    return unit;
  }

  /// Scales and weights are small: lanes write them side by side into the windows.
  DEEP_EP_DEVICE void store_beside(const Unit& unit) const {
    const auto words = static_cast<int>(params.window.words_beside), num_scales = params.rows.num_scales;
    const auto* const weights = reinterpret_cast<const std::uint32_t*>(params.topk_weights);
    const std::int64_t first_weight = std::int64_t{unit.token} * params.rows.num_topk;
    const std::uint32_t receivers = warp::ballot(unit.to >= 0);
    WarpPiece<std::uint32_t, 4> held;
#pragma unroll 1
    for (int first = 0; first < words; first += held.kElements) {
      held.each(first, words, [&](std::uint32_t& word, int at) {
        word = load_stream(at < num_scales ? params.scales.at(unit.token, at)
                                           : weights + (first_weight + at - num_scales));
      });
      each_bit(receivers, [&](int lane) {
        std::byte* const heap = params.common.heaps[warp::shuffle(unit.to, lane)];
        std::uint32_t* const to = params.window.beside(heap, params.common.rank, params.window.slot_of(unit.token));
        held.each(first, words, [=](std::uint32_t word, int at) { to[at] = word; });
      });
    }
  }

  /// Before ranks meet: the warp's first token comes to shared memory.
  DEEP_EP_DEVICE void prepare() {
    if (!sends() || warp_index() >= params.sending_warps) return;
    if (lane_index() == 0) pipe.init();
    const auto tokens = static_cast<std::uint32_t>(params.window.tokens_of(params.num_tokens));
    turns = Turns::of_warp(&params.common.state->pieces_drawn, tokens, params.sending_blocks * params.sending_warps,
                           warp_index() * params.sending_blocks + block_index() - params.first_sender);
    ahead = unit_of(turns.turn);
    if (ahead.row != nullptr) pipe.begin(ahead.row, params.rows.row_bytes);
  }
  /// By all warps of a block that sends. Each block adds its part to the words of this rank's rows, so none waits for
  /// another.
  DEEP_EP_DEVICE void send() {
    const IntranodeParams& common = params.common;
    turns.each(
        ahead, [&](std::uint32_t turn) { return unit_of(turn); },
        [&](const Unit& unit, const Unit& next) {
          // The row is loading. Each lane serves a rank, so that the stores are issued side by side.
          const auto to_each = [&](auto store) {
            if (unit.to < 0 || unit.to == common.rank) return;
            store(params.window.row(common.heaps[unit.to], landing_part(common.rank, unit.to),
                                    params.window.slot_of(unit.token)));
          };
          pipe.move([=] { return unit.row; }, [=] { return next.row; }, params.rows.row_bytes, to_each);
          store_beside(unit);
          return true;
        });
    pipe.drop();
    bulk::fence_global();
    block::sync();  // all stores of the block are complete
    block::each(common.num_ranks, [&](int peer) {
      add_release<Scope::system>(common.signal_to(peer, IntranodeSignal::dispatch_rows),
                                 Progress::part_of_call(params.sending_blocks, block_index() == params.first_sender));
    });
  }
};

}  // namespace deep_ep::device
