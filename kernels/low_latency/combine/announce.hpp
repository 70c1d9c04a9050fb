// The owner's word to the expert ranks at the head of combine: which experts its tokens select now, and with which
// weights. To every rank, as the owner no longer knows which ranks hold rows of its tokens.
#pragma once

#include "kernels/low_latency/combine/wait.hpp"
#include "kernels/low_latency/transport/head.hpp"
#include "kernels/low_latency/transport/poster.hpp"
#include "kernels/primitives/numeric.hpp"

namespace deep_ep::device::low_latency {

/// A selection at the time of combine: in the payload of a cell.
struct Selection {
  std::int32_t expert;  ///< negative: none
  float weight;

  DEEP_EP_DEVICE std::uint64_t packed() const {
    return std::uint64_t{bits_of(weight)} << 32 | static_cast<std::uint32_t>(expert);
  }
  DEEP_EP_DEVICE static Selection unpack(std::uint64_t payload) {
    return {static_cast<std::int32_t>(static_cast<std::uint32_t>(payload)),
            float_from_bits(static_cast<std::uint32_t>(payload >> 32))};
  }
};

/// Entry `k` of topk_idx of `token`, as the caller gave it.
DEEP_EP_DEVICE std::int64_t load_index(const LowLatencyCombineParams& params, int token, int k) {
  const std::int64_t at = std::int64_t{token} * params.num_topk + k;
  return params.topk_idx_is_64_bit ? load_stream(static_cast<const std::int64_t*>(params.topk_idx) + at)
                                   : load_stream(static_cast<const std::int32_t*>(params.topk_idx) + at);
}
/// The expert that it names, negative for none (or one that does not exist).
DEEP_EP_DEVICE std::int32_t expert_of(const LowLatencyCombineParams& params, std::int64_t index) {
  const std::int64_t experts = std::int64_t{params.num_local_experts} * params.common.num_ranks;
  return index < 0 || index >= experts ? -1 : static_cast<std::int32_t>(index);
}

/// What a selection is made of: loads that nothing has to wait for yet.
struct LoadedSelection {
  std::int64_t index;
  float weight;
};
DEEP_EP_DEVICE LoadedSelection load_selection(const LowLatencyCombineParams& params, int token, int k) {
  LoadedSelection loaded{load_index(params, token, k), 1.0f};
  if (params.topk_weights != nullptr) {
    loaded.weight = load_stream(params.topk_weights + std::int64_t{token} * params.num_topk + k);
  }
  return loaded;
}
DEEP_EP_DEVICE Selection selection_of(const LowLatencyCombineParams& params, const LoadedSelection& loaded) {
  return {expert_of(params, loaded.index), loaded.weight};
}

/// What `owner`, which is far, has announced. There once its progress says so.
DEEP_EP_DEVICE FarSelections far_selections(const LowLatencyParams& common, std::uint64_t epoch, int owner) {
  const std::byte* words = common.local + common.window.selections_at(epoch, owner, 0);
  return {reinterpret_cast<const std::uint64_t*>(words)};
}

/// Does the owner mean the same call?
DEEP_EP_DEVICE void check_far_shape(const LowLatencyCombineParams& params, const FarSelections& selections, int owner) {
  const std::uint64_t shape = load_weak(selections.words) >> 32;
  if (shape == params.call_shape) return;
  report_fault(params.common.wait, FaultKind::mismatch, Wanted::low_latency_combine_selection, owner, 0,
               params.call_shape, shape);
}

/// The rank of an expert, negative for none.
DEEP_EP_DEVICE int rank_of(const LowLatencyCombineParams& params, std::int32_t expert) {
  return expert < 0 ? -1 : expert / params.num_local_experts;
}

/// What a far owner has announced, and for how many tokens.
struct FarTokens {
  FarSelections selections;
  int count;

  /// The rank that selection `k` of `token` names, negative for none.
  DEEP_EP_DEVICE int rank_of_selection(const LowLatencyCombineParams& params, int token, int k) const {
    return rank_of(params, Selection::unpack(load_weak(selections.selection(token, params.num_topk, k))).expert);
  }
};

/// By a whole warp: waits for it. False: the call is over, as the owner does not come or means another one.
DEEP_EP_DEVICE bool await_far_tokens(const LowLatencyCombineParams& params, std::uint64_t epoch, int owner,
                                     FarTokens& tokens) {
  const LowLatencyParams& common = params.common;
  bool there = true;
  if (lane_index() == 0) {
    there = await_word(common, progress_word(common, LowLatencyKind::combine, epoch, owner), progress_value(epoch, 0),
                       epoch, owner, Wanted::low_latency_combine_selection);
  }
  there = warp::all(there);
  warp::sync();  // what one lane acquired, the others may read only after this
  if (!there) return false;
  tokens.selections = far_selections(common, epoch, owner);
  if (lane_index() == 0) check_far_shape(params, tokens.selections, owner);
  const auto count = static_cast<std::uint32_t>(load_weak(tokens.selections.words));
  tokens.count = static_cast<int>(count);
  return warp::all(count <= static_cast<std::uint32_t>(params.max_tokens));
}

/// One thread's part of the announcement of this block's tokens: a token has a cell for each peer and selection, and
/// the threads share them. What the first cell needs is loaded when this is made, before the epoch is known.
template <bool kRdma>
struct Announcer {
  const LowLatencyCombineParams& params;
  const int thread = thread_index();
  bool any;  ///< this thread has a first cell
  LoadedSelection first;
  std::uint64_t acknowledged;  ///< by the first cell's peer

  DEEP_EP_DEVICE Announcer(const LowLatencyCombineParams& p, bool wanted) : params(p), first{}, acknowledged(0) {
    any = wanted && thread < cells() && block_index() < params.num_tokens;
    if (!any) return;
    first = load_selection(params, block_index(), thread % params.num_topk);
    acknowledged = load_before_overwriting<Scope::system>(acknowledged_by(thread / params.num_topk));
  }

  /// A peer's cells are free once it has said that it is done with the call before the last. Peers that have not said
  /// so are waited for when all others know: these must not suffer from one that does not come.
  DEEP_EP_DEVICE void announce(std::uint64_t epoch) const {
    if (!any) return;
    const std::uint64_t before_last = epoch < 2 ? 0 : epoch - 2;
    bool late = true;
#pragma unroll 1
    for (int round = 0; late && round < 2; ++round) {  // to say it twice does no harm
      late = false;
#pragma unroll 1
      for (int token = block_index(); token < params.num_tokens; token += params.common.working_blocks) {
#pragma unroll 1
        for (int cell = thread; cell < cells(); cell += block_threads()) {
          const bool is_first = round == 0 && token == block_index() && cell == thread;
          const int peer = cell / params.num_topk;
          const int k = cell % params.num_topk;
          if (masked(params.common, peer) || is_far<kRdma>(params.common, peer)) continue;
          const std::uint64_t seen =
              is_first ? acknowledged : load_before_overwriting<Scope::system>(acknowledged_by(peer));
          if (seen < before_last) {
            late = round == 0 || late;
            if (round == 0 || !await_word(params.common, acknowledged_by(peer), before_last, epoch, peer,
                                          Wanted::low_latency_combine_credit)) {
              continue;
            }
          }
          tell(peer, token, k, selection_of(params, is_first ? first : load_selection(params, token, k)), epoch);
        }
      }
    }
  }

 private:
  DEEP_EP_DEVICE void tell(int peer, int token, int k, const Selection& selection, std::uint64_t epoch) const {
    const LowLatencyParams& common = params.common;
    Peer{common.heaps[peer]}.put_cell(
        common.window.selections_at(epoch, common.rank, token) + static_cast<std::size_t>(k) * sizeof(Cell),
        selection.packed(), epoch);
  }

  DEEP_EP_DEVICE int cells() const { return params.common.num_ranks * params.num_topk; }
  DEEP_EP_DEVICE const std::uint64_t* acknowledged_by(int peer) const {
    return acknowledged_word(params.common, LowLatencyKind::combine, peer);
  }
};

}  // namespace deep_ep::device::low_latency
