// The owner's word to the expert ranks at the head of combine: which experts its tokens select now, and with which
// weights. To every rank, because the owner no longer knows which ranks hold rows of its tokens.
#pragma once

#include "kernels/low_latency/transport/masks.hpp"
#include "kernels/primitives/numeric.hpp"

namespace deep_ep::device::low_latency {

/// What ranks mean by the call: its shape, and the dispatch that the handle is of.
DEEP_EP_DEVICE std::uint32_t call_of(const LowLatencyCombineParams& params) {
  const LowLatencyRowTable table{const_cast<std::int32_t*>(params.row_table), params.common.num_ranks,
                                 params.max_tokens, params.num_topk};
  return params.call_shape ^ static_cast<std::uint32_t>(load_stream(table.epoch()));
}

/// A selection at the time of combine. A cell has all of call_of(): its lower half beside expert and weight in the
/// payload, its upper half above the epoch.
struct Selection {
  std::int32_t expert;  ///< below 65535; negative: none
  float weight;

  DEEP_EP_DEVICE std::uint64_t packed(std::uint32_t call) const {
    return std::uint64_t{bits_of(weight)} << 32 | call << 16 | (static_cast<std::uint32_t>(expert) & 0xffffu);
  }
  DEEP_EP_DEVICE static Selection unpack(std::uint64_t payload) {
    const auto expert = static_cast<std::int32_t>(payload & 0xffffu);
    return {expert == 0xffff ? -1 : expert, float_from_bits(static_cast<std::uint32_t>(payload >> 32))};
  }

  static constexpr int kEpochBits = 48;  ///< as many as progress_value() has
  /// What a cell says as its epoch.
  DEEP_EP_DEVICE static std::uint64_t stamp(std::uint64_t epoch, std::uint32_t call) {
    return std::uint64_t{call >> 16} << kEpochBits | epoch;
  }
  DEEP_EP_DEVICE static std::uint64_t epoch_in(const Cell& cell) {
    return cell.epoch & ((std::uint64_t{1} << kEpochBits) - 1);
  }
  DEEP_EP_DEVICE static std::uint32_t call_in(const Cell& cell) {
    return static_cast<std::uint32_t>(cell.epoch >> kEpochBits) << 16 | static_cast<std::uint32_t>(cell.payload) >> 16;
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
  /// By one thread for each selection.
  DEEP_EP_DEVICE void report_unknown(const LoadedSelection& loaded, int token) const {
    const int experts = params.num_local_experts * params.common.num_ranks;
    if (loaded.index < experts || !params.report_unknown_experts) return;
    note_fault(params.common.wait, FaultKind::unknown_expert, Wanted::nothing, params.common.rank, token,
               static_cast<std::uint64_t>(loaded.index), static_cast<std::uint64_t>(experts));
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
  const std::uint64_t* words;  ///< of a far owner, once it has announced them

  DEEP_EP_DEVICE static std::uint64_t head(const LowLatencyCombineParams& params) {
    return std::uint64_t{call_of(params)} << 32 | static_cast<std::uint32_t>(params.num_tokens);
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
  template <class Reach>
  DEEP_EP_DEVICE void check_call(const Reach& reach, int owner) const {
    const std::uint64_t theirs = load_weak(words) >> 32;
    const std::uint32_t ours = call_of(params);
    if (theirs != ours) refuse_call(params.common, reach.epoch, owner, 0, ours, theirs);
  }
  /// By a whole warp: waits for the owner's selections. Of how many tokens; negative: the call is over.
  template <class Reach>
  DEEP_EP_DEVICE int await_count(const Reach& reach, int owner) const {
    constexpr Wanted kWanted = Wanted::low_latency_combine_selection;
    if (!warp::agree(lane_index() != 0 || reach.await_progress(owner, 0, kWanted))) return -1;
    if (lane_index() == 0) check_call(reach, owner);
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
  DEEP_EP_DEVICE void announce(const Reach& reach, std::uint32_t call) const {
    if (!any) return;
    const LowLatencyParams& common = params.common;
    const Selections selections{params};
    bool late = true;
#pragma unroll 1
    for (int round = 0; late && round < 2; ++round) {  // saying it twice does no harm
      late = false;
#pragma unroll 1
      for (int token = block_index(); token < params.num_tokens; token += common.working_blocks) {
#pragma unroll 1
        for (int cell = thread; cell < cells(); cell += block_threads()) {
          const bool is_first = round == 0 && token == block_index() && cell == thread;
          const int peer = cell / params.num_topk;
          const int k = cell % params.num_topk;
          if (masked(common, peer) || reach.is_far(peer)) continue;
          if (!reach.has_room(is_first ? acknowledged : reach.load_acknowledged(peer))) {
            late = round == 0 || late;
            if (round == 0 || !reach.await_room(peer)) continue;
          }
          const LoadedSelection loaded = is_first ? first : selections.load(token, k);
          Cell* const to = common.window.selections(reach.epoch, common.rank, token).in(common.heaps[peer]) + k;
          store_cell(to, selections.packed(loaded).packed(call), Selection::stamp(reach.epoch, call));
          if (peer == common.rank) selections.report_unknown(loaded, token);
        }
      }
    }
  }

 private:
  DEEP_EP_DEVICE int cells() const { return params.common.num_ranks * params.num_topk; }
};

}  // namespace deep_ep::device::low_latency
