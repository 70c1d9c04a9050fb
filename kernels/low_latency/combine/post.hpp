// The blocks of the low-latency combine that post to ranks reached by RDMA. As owner: the selections of this rank's
// tokens. As expert side: the rows that pushing groups have staged, in the order of the owner's tokens.
#pragma once

#include "kernels/low_latency/combine/announce.hpp"
#include "kernels/low_latency/combine/shared.hpp"
#include "kernels/low_latency/transport/rails.hpp"
#include "kernels/primitives/block.hpp"

namespace deep_ep::device::low_latency {

struct CombinePoster {
  const LowLatencyCombineParams& params;
  const CombineWire& wire;
  std::uint64_t epoch;
  int peer;

  using Poster = LowLatencyPoster<LowLatencyKind::combine>;

  /// By one warp: all that the peer gets of this rank in one call.
  DEEP_EP_DEVICE void post_all(Poster& poster) const {
    if (!post_selections(poster)) return;
    const Rails rails(common());
    if (!rails.used()) {
      post_rows(poster);
    } else if (rails.is_rail(peer)) {
      post_node_rows(rails, poster);
    }
  }

 private:
  DEEP_EP_DEVICE const LowLatencyParams& common() const { return params.common; }
  DEEP_EP_DEVICE const LowLatencyStaging& staging() const { return params.common.rdma.staging; }

  DEEP_EP_DEVICE bool post_selections(Poster& poster) const {
    const std::uint32_t bytes = FarSelections::bytes(params.num_tokens, params.num_topk);
    const std::size_t from = staging().selections_at(epoch, block_index() - common().working_blocks);
    const std::size_t to = common().window.selections_at(epoch, common().rank, 0);
    if (!poster.put(to, from, bytes, lane_index() == 0) || !poster.progress(0)) return false;
    poster.flush();
    return true;
  }

  DEEP_EP_DEVICE void post_rows(Poster& poster) const {
    const RowTable table{const_cast<std::int32_t*>(params.row_table), common().num_ranks, params.max_tokens,
                         params.num_topk};
    const std::int32_t rows = load_stream(table.rows(peer));
    for (int begin = 0; begin < rows; begin += kWarpSize) {
      const int row = begin + lane_index();
      const bool mine = row < rows;
      const std::int32_t token = mine ? load_stream(table.token(peer, row)) : 0;
      if (!post_batch(poster, mine, row, token, params.warps_per_row)) return;
    }
  }

  /// By rails: what this node has to say of the peer's tokens, as the warps of a block have added it up.
  DEEP_EP_DEVICE void post_node_rows(const Rails& rails, Poster& poster) const {
    FarTokens tokens{};
    if (!await_far_tokens(params, epoch, peer, tokens)) return;
    for (int begin = 0; begin < tokens.count; begin += kWarpSize) {
      const int token = begin + lane_index();
      bool mine = false;
      for (int k = 0; token < tokens.count && k < params.num_topk; ++k) {
        const int rank = tokens.rank_of_selection(params, token, k);
        mine = mine || (rank >= 0 && rails.node_of(rank) == rails.own_node());
      }
      if (!post_batch(poster, mine, token, token, block_warps())) return;
    }
  }

  /// Posts row `row` of the staging memory, of the peer's token `token`, for each lane with `mine`, when the `warps`
  /// that share it have staged it.
  DEEP_EP_DEVICE bool post_batch(Poster& poster, bool mine, int row, std::int32_t token, int warps) const {
    if (!mine) row = 0;
    const std::size_t from = staging().combine_row_at(epoch, peer, row, params.row_bytes);
    const std::size_t to =
        common().window.row_at(LowLatencyKind::combine, epoch, common().rank, token, params.row_bytes);
    const auto* ready =
        reinterpret_cast<const std::uint64_t*>(common().local + staging().combine_ready_at(epoch, peer, row, 0));
    return poster.post_rows(
        mine, token + 1, [&] { return state_of(ready, warps); },
        [&](bool posts) {
          return wire.logfmt ? put_encoded(poster, to, from, posts) : poster.put(to, from, wire.bytes(), posts);
        });
  }

  /// All `warps` that share a row come to the same result, but one after the other.
  DEEP_EP_DEVICE StagedRow state_of(const std::uint64_t* ready, int warps) const {
    bool there = true;
    bool nothing = false;
    for (int warp = 0; warp < warps; ++warp) {
      const std::uint64_t seen = load_before_fence<Scope::gpu>(ready + warp);
      nothing = nothing || seen == no_row_flag(epoch);
      there = there && (seen == epoch || seen == no_row_flag(epoch));
    }
    if (!there) return StagedRow::awaited;
    fence<Scope::gpu>();
    return nothing ? StagedRow::nothing : StagedRow::staged;
  }

  /// LogFMT: row by row, a lane a chunk, each in the length that it has.
  DEEP_EP_DEVICE bool put_encoded(Poster& poster, std::size_t to, std::size_t from, bool posts) const {
    warp::sync();  // what one lane acquired, all read
    for (std::uint32_t left = warp::ballot(posts); left != 0; left &= left - 1) {
      const std::size_t row_to = warp::shuffle(to, lowest_bit(left));
      const std::size_t row_from = warp::shuffle(from, lowest_bit(left));
      for (int begin = 0; begin < wire.chunks(); begin += kWarpSize) {
        const int chunk = begin + lane_index();
        const bool wanted = chunk < wire.chunks();
        const std::size_t at = static_cast<std::size_t>(wanted ? chunk : 0) * wire.chunk_lines() * kTaggedLine;
        // Its first word is a range, which says whether it is encoded.
        const auto* range = reinterpret_cast<const std::uint32_t*>(common().local + row_from + at);
        const bool encoded = wanted && (load_weak(range) & kEncoded) != 0;
        const std::uint32_t lines = wanted ? wire.lines_of_chunk(chunk, encoded) : 0;
        if (!poster.put(row_to + at, row_from + at, lines * kTaggedLine, wanted)) return false;
      }
    }
    return true;
  }
};

/// By whole blocks. `shared`, `words`: memory of the block.
DEEP_EP_DEVICE void post_combine(const LowLatencyCombineParams& params, const CombineWire& wire, Epochs& shared,
                                 std::byte* words) {
  const LowLatencyParams& common = params.common;
  constexpr LowLatencyKind kCombine = LowLatencyKind::combine;

  // 1. Which call is this? The selections, once for all ranks of this block.
  if (thread_index() == 0) shared = read_epochs(common, kCombine);
  block::sync();
  const Epochs epochs = shared;
  const std::uint64_t epoch = epochs.sent + 1;
  if (thread_index() == 0) arrive_at_epoch(common, kCombine, epochs, params.phase);
  if (sends(params.phase)) {
    const std::size_t at = common.rdma.staging.selections_at(epoch, block_index() - common.working_blocks);
    auto* staged = reinterpret_cast<std::uint64_t*>(common.local + at);
    if (thread_index() == 0) staged[0] = FarSelections::head(params.num_tokens, params.call_shape);
    for (int i = thread_index(); i < params.num_tokens * params.num_topk; i += block_threads()) {
      staged[1 + i] = selection_of(params, load_selection(params, i / params.num_topk, i % params.num_topk)).packed();
    }
  }
  block::sync();

  // 2. Each warp its rank.
  const int peer = rank_of_poster(common);
  if (peer >= common.num_ranks || !is_far(common, peer) || warp::any(masked(common, peer))) return;
  CombinePoster::Poster poster(common, set_up_poster(common, LowLatencyChannel::combine, peer, words), epoch);
  bool on = poster.acknowledge(epochs.received);
  if (sends(params.phase)) {
    on = on && (common.mask == nullptr || poster.begin());
    on = on && poster.await_credit([&](const std::uint64_t* word, std::uint64_t call) {
      return await_word(common, word, call, epoch, peer, Wanted::low_latency_combine_credit);
    });
    if (on) CombinePoster{params, wire, epoch, peer}.post_all(poster);
  }
  poster.close();
}

}  // namespace deep_ep::device::low_latency
