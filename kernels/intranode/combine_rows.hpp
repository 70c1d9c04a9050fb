// Where an owner finds the rows of its tokens: in the memory of a peer that lets them be pulled, or in its own window.
#pragma once

#include "kernels/common/row_sum.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/intranode/combine_shared.hpp"
#include "kernels/primitives/memory.hpp"

namespace deep_ep::device {

struct CombineRows {
  const CombineParams& params;
  const CombinePeer* peers;
  std::uint64_t epoch;

  /// Row of the token at `rank` as dispatch planned it, -1: none.
  DEEP_EP_DEVICE std::int32_t planned_row(int token, int rank) const {
    if (rank >= params.common.num_ranks) return -1;
    return load_stream(params.destination_row + std::int64_t{token} * params.common.num_ranks + rank);
  }
  /// The planned row, -1: none, or lost because that rank had no room for it.
  DEEP_EP_DEVICE std::int32_t row_held(std::int32_t planned, int rank) const {
    return planned >= 0 && planned < peers[rank].num_rows ? planned : -1;
  }
  /// The address of row `row` of `rank`; the row belongs to the token.
  DEEP_EP_DEVICE FoundRow row(int token, int rank, std::int32_t row) const {
    const CombinePeer& peer = peers[rank];
    if (!peer.pushes) {
      return {peer.x + std::int64_t{row} * params.row_bytes, peer.topk_weights + std::int64_t{row} * params.num_topk};
    }
    const std::byte* slot = params.window.row(rank, token);
    return {slot, reinterpret_cast<const float*>(slot + params.row_bytes)};
  }
  /// Waits until the row is there; those that are read where they lie always are. False after a fault.
  DEEP_EP_DEVICE bool await(int token, int rank) const {
    if (!peers[rank].pushes) return true;
    const std::uint64_t* flag = params.common.flag_from(rank, params.window.slot(token));
    const std::uint64_t round = params.window.round_of(token);
    return wait_signal(ReportLateHere{{params.wait}}, flag,
                       {rank, Wanted::combine_rows, round_signal(epoch, round + 1)});
  }
};

}  // namespace deep_ep::device
