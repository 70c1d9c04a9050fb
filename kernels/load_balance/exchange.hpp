// What both kernels of a load-balance call do. The work on this rank is its experts that have replicas, cut into
// pieces, which all warps of all blocks take one by one: so few replicas keep every SM as busy as many do.
#pragma once

#include "kernels/common/tickets.hpp"
#include "kernels/load_balance/params.hpp"
#include "kernels/normal/meet.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/bulk.hpp"

namespace deep_ep::device {

/// By all threads of all blocks: `move()` does the block's part, bulk copies included. No rank's slots are written, and
/// none of its gradients read, before that rank has reached the call; and no rank goes on before all have done their
/// part.
template <class Move>
DEEP_EP_DEVICE void exchange(const LoadBalanceParams& params, Move move) {
  const IntranodeParams& common = params.common;
  const Call call = Call::begin(common.state->load_balance, params.wait);

  // 1. All ranks come.
  const Meeting meeting{common,     {params.wait},    Wanted::load_balance_call, MeetingKind::load_balance,
                        call.epoch, params.first_rank};
  const Arrival ours{{0, 0, 0, 0, static_cast<std::int32_t>(params.shape ^ params.shape >> 32)}};
  if (call.begun && block_index() == 0) meeting.announce(ours);
  const bool come = call.begun && meeting.hear_all(ours);
  fence<Scope::system>();  // gradients that peers had written before are read by ordinary loads
  bulk::fence_global();    // the peers' signals also allow bulk stores into their slots
  const bool good = block::all(come);

  // 2. This rank moves what it has to.
  if (good) move();

  // 3. The last block tells all ranks, and waits until they are done, too.
  call.end([&] {
    // After a fault in another block its pieces are missing, and no peer may take them for moved.
    const int peers = good && !aborted(params.wait) ? common.num_ranks : 0;
    block::each(peers, [&](int peer) {
      store_release<Scope::system>(common.signal_to(peer, IntranodeSignal::load_balance_done), call.epoch);
    });
    block::each(peers, [&](int peer) {
      wait_signal(params.wait, common.signal_from(peer, IntranodeSignal::load_balance_done),
                  {params.first_rank + peer, Wanted::load_balance_done, call.epoch});
    });
    if (thread_index() == 0) store_relaxed<Scope::gpu>(&common.state->next_piece, std::uint32_t{0});
  });
}

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
  DEEP_EP_DEVICE ExpertPiece take() { return piece(take_next(&params.common.state->next_piece)); }
};

}  // namespace deep_ep::device
