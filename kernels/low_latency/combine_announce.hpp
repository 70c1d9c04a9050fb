// The owner's word to the expert ranks at the head of combine: which experts its tokens select now, and with which
// weights. To every rank, as the owner no longer knows which ranks hold rows of its tokens.
#pragma once

#include "kernels/low_latency/params.hpp"
#include "kernels/low_latency/peer.hpp"
#include "kernels/low_latency/wait.hpp"
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

/// The expert that selection `k` of `token` names, negative for none (or one that does not exist).
DEEP_EP_DEVICE std::int32_t load_expert(const LowLatencyCombineParams& params, int token, int k) {
  const std::int64_t at = std::int64_t{token} * params.num_topk + k;
  const std::int64_t expert = params.topk_idx_is_64_bit
                                  ? load_stream(static_cast<const std::int64_t*>(params.topk_idx) + at)
                                  : load_stream(static_cast<const std::int32_t*>(params.topk_idx) + at);
  const std::int64_t experts = std::int64_t{params.num_local_experts} * params.common.num_ranks;
  return expert < 0 || expert >= experts ? -1 : static_cast<std::int32_t>(expert);
}

/// Tells every peer the selections of this block's tokens. A peer's cells are free once it has said that it is done
/// with the call before the last.
DEEP_EP_DEVICE void announce_selections(const LowLatencyCombineParams& params, std::uint64_t epoch) {
  const LowLatencyParams& common = params.common;
  const LowLatencyWindow& window = common.window;
  const int cells = common.num_ranks * params.num_topk;
  const std::uint64_t before_last = epoch < 2 ? 0 : epoch - 2;
  for (int token = block_index(); token < params.num_tokens; token += grid_blocks()) {
    for (int cell = thread_index(); cell < cells; cell += block_threads()) {
      const int peer = cell / params.num_topk;
      const int k = cell % params.num_topk;
      const Selection selection{load_expert(params, token, k),
                                load_stream(params.topk_weights + std::int64_t{token} * params.num_topk + k)};
      const auto* acknowledged =
          reinterpret_cast<const std::uint64_t*>(common.local + window.acknowledged_at(LowLatencyKind::combine, peer));
      if (masked(common, peer)) continue;
      if (!wait_for_signal(common, acknowledged, before_last, peer, Wanted::low_latency_combine_credit)) continue;
      Peer{common.heaps[peer]}.put_cell(
          window.selections_at(epoch, common.rank, token) + static_cast<std::size_t>(k) * sizeof(Cell),
          selection.packed(), epoch);
    }
  }
}

}  // namespace deep_ep::device::low_latency
