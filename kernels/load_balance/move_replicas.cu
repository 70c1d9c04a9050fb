// Weights of this rank's experts go to the slots of other ranks that hold replicas of them. Or gradients of replicas
// are added to those of this rank's experts, in fp32, in the order of ranks and slots.
//
// The work on this rank is its experts that have replicas, cut into pieces, which all warps of all blocks take one by
// one: so few replicas keep every SM as busy as many do. A warp holds a piece in registers. It loads from other ranks'
// memory by ordinary loads, many at once: bulk loads from a peer are slower (results/measurements/).
#include "kernels/common/row_copy.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/load_balance/params.hpp"
#include "kernels/normal/meet.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/numeric.hpp"

namespace deep_ep::device {

/// A warp's way through the pieces. All methods are for the whole warp.
struct ReplicatedPieces {
  using Piece = WarpPiece<Vec16, LoadBalanceParams::kPieceBytes / (kWarpSize * sizeof(Vec16))>;

  const LoadBalanceParams& params;
  int expert = -1;                   ///< local, that the latest piece was of
  std::uint32_t first = 0, end = 0;  ///< turns of that expert's pieces

  /// The first place of the mapping from `from` on that holds a replica of the expert, -1: there is none.
  DEEP_EP_DEVICE int find(int from) const {
    const int wanted = params.common.rank * params.num_local_experts + expert;
    const int places = params.common.num_ranks * params.num_slots;
    for (; from < places; from += kWarpSize) {
      const int place = from + lane_index();
      const std::uint32_t holders = warp::ballot(place < places && load_weak(params.mapping + place) == wanted);
      if (holders != 0) return from + lowest_bit(holders);
    }
    return -1;
  }

  /// Goes to the expert of the piece whose turn it is; turns only grow. False when no piece is left.
  DEEP_EP_DEVICE bool seek(std::uint32_t turn) {
    while (turn >= end) {
      if (++expert >= params.num_local_experts) return false;
      first = end;
      if (find(0) >= 0) end += params.num_pieces;
    }
    return true;
  }

  /// Moves the piece to all replicas, or adds it up.
  DEEP_EP_DEVICE void move(std::uint32_t turn) const {
    const std::uint32_t number = turn - first;
    int at = params.num_payloads - 1;
    while (params.payloads[at].first_piece > number) --at;
    const ExpertPayload& payload = params.payloads[at];
    Piece held{};
    const int first = static_cast<int>(number - payload.first_piece) * held.kElements;
    const auto end = static_cast<int>(payload.bytes / sizeof(Vec16));  // of the expert: a piece may be shorter
    const auto load = [=](Piece& to, const Vec16* from) {
      to.each(first, end, [=](Vec16& vector, int at) { vector = load_weak(from + at); });
    };
    const auto store = [&](Vec16* to) {
      held.each(first, end, [=](const Vec16& vector, int at) { store_stream(to + at, vector); });
    };
    auto* const own = reinterpret_cast<Vec16*>(payload.own + std::uint64_t{payload.bytes} * expert);
    load(held, own);
    for (int place = find(0); place >= 0; place = find(place + 1)) {
      const int slot = place % params.num_slots;
      auto* const replica = reinterpret_cast<Vec16*>(params.common.heaps[place / params.num_slots] + payload.slots_at +
                                                     std::uint64_t{payload.bytes} * slot);
      if (!params.reduces) {
        store(replica);
        continue;
      }
      Piece other{};
      load(other, replica);
#pragma unroll
      for (int i = 0; i < held.kElements / kWarpSize * 4; ++i) {
        std::uint32_t& word = held.of_lane[i / 4].word[i % 4];
        word = bits_of(float_from_bits(word) + float_from_bits(other.of_lane[i / 4].word[i % 4]));
      }
    }
    if (params.reduces) store(own);
  }

  /// Moves pieces until none is left.
  DEEP_EP_DEVICE void move_all() {
    std::uint32_t* const next = &params.common.state->pieces_drawn;
    std::uint32_t turn = take_next(next);
    while (seek(turn)) {
      const std::uint32_t ticket = lane_index() == 0 ? count_up(next) : 0;  // not needed before this piece is done
      move(turn);
      turn = warp::shuffle(ticket, 0);
    }
  }
};

/// No rank's slots are written, and none of its gradients read, before that rank has reached the call; and no rank goes
/// on before all have done their part.
DEEP_EP_DEVICE void move_replicas_body(const LoadBalanceParams& params, std::byte* /*shared*/) {
  const IntranodeParams& common = params.common;
  const Call call = Call::begin(common.state->load_balance, common.wait);

  // 1. All ranks come.
  const Meeting meeting{common, Wanted::load_balance_call, MeetingKind::load_balance, call.epoch, params.first_rank};
  const Arrival ours{{0, 0, 0, 0, static_cast<std::int32_t>(params.shape)}};
  if (call.begun && block_index() == 0) meeting.announce(ours);
  const bool come = call.begun && meeting.hear_all(ours);
  fence<Scope::system>();  // gradients that peers had written before are read by ordinary loads
  const bool good = block::all(come);

  // 2. This rank moves what it has to.
  if (good) ReplicatedPieces{params}.move_all();

  // 3. The last block tells all ranks, and waits until they are done, too.
  call.end([&] {
    // After a fault in another block its pieces are missing, and no peer may take them for moved.
    const int peers = good && !aborted(common.wait) ? common.num_ranks : 0;
    block::each(peers, [&](int peer) {
      store_release<Scope::system>(common.signal_to(peer, IntranodeSignal::load_balance_done), call.epoch);
    });
    block::each(peers, [&](int peer) {
      wait_signal(common.wait, common.signal_from(peer, IntranodeSignal::load_balance_done),
                  {params.first_rank + peer, Wanted::load_balance_done, call.epoch});
    });
    if (thread_index() == 0) store_relaxed<Scope::gpu>(&common.state->pieces_drawn, std::uint32_t{0});
  });
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(move_replicas, deep_ep::device::move_replicas_body)
