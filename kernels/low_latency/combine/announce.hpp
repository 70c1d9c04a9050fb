// The owner's word to the expert ranks at the head of combine: which experts its tokens select now, and with which
// weights. To every rank, because the owner no longer knows which ranks hold rows of its tokens.
#pragma once

#include "kernels/low_latency/transport/masks.hpp"
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

/// What a selection is made of: loads that nothing has to wait for yet.
struct LoadedSelection {
  std::int64_t index;
  float weight;
};

/// The table of selections as combine's caller gave it, and what it means.
struct Selections {
  const LowLatencyCombineParams& params;

  DEEP_EP_DEVICE LoadedSelection load(int token, int k) const {
    const std::int64_t at = std::int64_t{token} * params.num_topk + k;
    return {params.topk_idx.load(at), params.topk_weights == nullptr ? 1.0f : load_stream(params.topk_weights + at)};
  }
  /// An expert that does not exist is none.
  DEEP_EP_DEVICE int expert_of(std::int64_t index) const {
    return deep_ep::expert_of(index, params.num_local_experts * params.common.num_ranks);
  }
  DEEP_EP_DEVICE Selection packed(const LoadedSelection& loaded) const {
    return {expert_of(loaded.index), loaded.weight};
  }
  /// The rank of an expert, negative for none.
  DEEP_EP_DEVICE int rank_of(int expert) const { return expert < 0 ? -1 : expert / params.num_local_experts; }
  /// The rank that selection `k` of this rank's token names, negative for none.
  DEEP_EP_DEVICE int rank_of_selection(int token, int k) const {
    return rank_of(expert_of(params.topk_idx.load(std::int64_t{token} * params.num_topk + k)));
  }
};

/// Selections as they travel by RDMA: 64-bit words, first one for the call, then [token][k] as in cells.
struct FarSelections {
  const LowLatencyCombineParams& params;
  const std::uint64_t* words;  ///< of a far owner that has announced them

  DEEP_EP_DEVICE static std::uint64_t head(const LowLatencyCombineParams& params) {
    return std::uint64_t{params.call_shape} << 32 | static_cast<std::uint32_t>(params.num_tokens);
  }
  DEEP_EP_DEVICE static std::uint32_t bytes(const LowLatencyCombineParams& params) {
    return (1 + static_cast<std::uint32_t>(params.num_tokens * params.num_topk)) * sizeof(std::uint64_t);
  }

  DEEP_EP_DEVICE Selection selection(int token, int k) const {
    return Selection::unpack(load_weak(words + 1 + token * params.num_topk + k));
  }
  /// The rank that selection `k` of `token` names, negative for none.
  DEEP_EP_DEVICE int rank_of_selection(int token, int k) const {
    return Selections{params}.rank_of(selection(token, k).expert);
  }
  /// Does the owner mean the same call? Ends it otherwise.
  DEEP_EP_DEVICE void check_shape(int owner) const {
    const std::uint64_t shape = load_weak(words) >> 32;
    if (shape == params.call_shape) return;
    report_fault(params.common.wait, FaultKind::mismatch, Wanted::low_latency_combine_selection, owner, 0,
                 params.call_shape, shape);
  }
  /// By a whole warp: of how many tokens. Negative: the call is over, as the owner means another one.
  DEEP_EP_DEVICE int count(int owner) const {
    if (lane_index() == 0) check_shape(owner);
    const auto count = static_cast<std::uint32_t>(load_weak(words));
    return warp::all(count <= static_cast<std::uint32_t>(params.max_tokens)) ? static_cast<int>(count) : -1;
  }
};

/// One thread's part of the announcement of this block's tokens: a token has a cell for each peer and selection, and
/// the threads share them. What the first cell needs is loaded when this is made, before the epoch is known.
template <class Reach>
struct Announcer {
  const LowLatencyCombineParams& params;
  const int thread = thread_index();
  bool any;  ///< this thread has a first cell
  LoadedSelection first;
  std::uint64_t acknowledged;  ///< by the first cell's peer

  /// `reach`: of no call yet.
  DEEP_EP_DEVICE Announcer(const LowLatencyCombineParams& p, const Reach& reach, bool wanted)
      : params(p), first{}, acknowledged(0) {
    any = wanted && thread < cells() && block_index() < params.num_tokens;
    if (!any) return;
    first = Selections{params}.load(block_index(), thread % params.num_topk);
    acknowledged = reach.load_acknowledged(thread / params.num_topk);
  }

  /// A peer's cells are free once it has said that it is done with the call before the last. We wait for peers that
  /// have not said so only when all others have been told: they must not suffer from one that does not come.
  DEEP_EP_DEVICE void announce(const Reach& reach) const {
    if (!any) return;
    const Selections selections{params};
    bool late = true;
#pragma unroll 1
    for (int round = 0; late && round < 2; ++round) {  // saying it twice does no harm
      late = false;
#pragma unroll 1
      for (int token = block_index(); token < params.num_tokens; token += params.common.working_blocks) {
#pragma unroll 1
        for (int cell = thread; cell < cells(); cell += block_threads()) {
          const bool is_first = round == 0 && token == block_index() && cell == thread;
          const int peer = cell / params.num_topk;
          const int k = cell % params.num_topk;
          Cell* to = masked(params.common, peer) ? nullptr : reach.selections_to(peer, token);
          if (to == nullptr) continue;
          if (!reach.has_room(is_first ? acknowledged : reach.load_acknowledged(peer))) {
            late = round == 0 || late;
            if (round == 0 || !reach.await_room(peer)) continue;
          }
          const Selection selection = selections.packed(is_first ? first : selections.load(token, k));
          store_cell(to + k, selection.packed(), reach.epoch);
        }
      }
    }
  }

 private:
  DEEP_EP_DEVICE int cells() const { return params.common.num_ranks * params.num_topk; }
};

}  // namespace deep_ep::device::low_latency
