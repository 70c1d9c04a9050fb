// The work of a load-balance call on this rank: those of its experts that have replicas, cut into pieces, which all
// warps of all blocks take one by one. So few replicas keep every SM as busy as many do.
#pragma once

#include "kernels/common/tickets.hpp"
#include "kernels/load_balance/params.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

/// A piece of one of this rank's experts.
struct ExpertPiece {
  int expert = -1;  ///< local; -1: no piece is left
  const ExpertPayload* payload = nullptr;
  std::uint32_t offset = 0, bytes = 0;  ///< in the payload

  DEEP_EP_DEVICE bool exists() const { return expert >= 0; }
  DEEP_EP_DEVICE std::byte* own() const { return payload->own + std::uint64_t{payload->bytes} * expert + offset; }
};

/// A warp's way through the pieces. All methods are for the whole warp.
struct ReplicatedPieces {
  const LoadBalanceParams& params;
  int expert = -1;                   ///< that the latest piece was of
  std::uint32_t first = 0, end = 0;  ///< turns of that expert's pieces

  /// Does the slot at `place` of the mapping hold a replica of this rank's expert `local`? Its lanes ask for places of
  /// their own.
  DEEP_EP_DEVICE bool holds(int place, int local) const {
    return place < params.common.num_ranks * params.num_slots &&
           load_weak(params.mapping + place) == params.common.rank * params.num_local_experts + local;
  }

  /// The first place from `from` on with a replica of expert `local`, -1: there is none.
  DEEP_EP_DEVICE int find(int local, int from) const {
    for (; from < params.common.num_ranks * params.num_slots; from += kWarpSize) {
      const std::uint32_t holders = warp::ballot(holds(from + lane_index(), local));
      if (holders != 0) return from + lowest_bit(holders);
    }
    return -1;
  }

  /// The piece whose turn it is. Turns only grow.
  DEEP_EP_DEVICE ExpertPiece piece(std::uint32_t turn) {
    while (turn >= end) {
      if (++expert >= params.num_local_experts) {
        expert = params.num_local_experts;  // and stays there
        return {};
      }
      first = end;
      if (find(expert, 0) >= 0) end += params.num_pieces;
    }
    const std::uint32_t number = turn - first;
    int at = params.num_payloads - 1;
    while (params.payloads[at].first_piece > number) --at;
    const ExpertPayload& payload = params.payloads[at];
    const std::uint32_t offset = (number - payload.first_piece) * params.piece_bytes;
    const std::uint32_t rest = payload.bytes - offset;
    return {expert, &payload, offset, rest < params.piece_bytes ? rest : params.piece_bytes};
  }

  /// Takes the next one.
  DEEP_EP_DEVICE ExpertPiece take() { return piece(take_next(&params.common.state->load_balance_next_piece)); }
};

}  // namespace deep_ep::device
