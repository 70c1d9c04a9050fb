// The pushing warps of combine: in each, one thread moves rows of this rank through stages in shared memory into the
// windows of their owners, the other ranks; the other lanes look up where the next rows belong. One more warp raises
// the rows' flags once they are complete there: the fence that this takes waits for answers from all peers, and would
// delay the warps that move rows.
//
// A window holds so many tokens of a source. An owner with more works in rounds of a fraction of that, so that a part
// is filled while the others are added up; rounds are pushed in the same order by all ranks, which keeps credits free
// of cycles.
#pragma once

#include "kernels/common/wait.hpp"
#include "kernels/intranode/combine_shared.hpp"
#include "kernels/primitives/bulk.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

/// The stages of a pushing warp. Loads run ahead of stores; a stage is free once its store has read it; stores complete
/// later, and then the flag raiser is told. By one thread.
struct PushStages {
  static constexpr std::uint32_t kUnderWay = 6;  ///< stores that need not be complete when the next is issued
  static constexpr std::uint32_t kPieces = PushedRing::kPieces;
  Mbarrier* barriers;
  PushedRing& ring;
  std::byte* data;
  std::uint32_t stages, stage_bytes;
  std::uint32_t loaded = 0, stored = 0;
  std::uint32_t told = 0;  ///< pieces that the flag raiser knows to be complete

  /// The next slot of the ring, once the flag raiser is done with it.
  DEEP_EP_DEVICE PushedPiece& next_slot() {
    const std::uint32_t slot = loaded % kPieces;
    if (loaded >= kPieces) mbarrier::wait(ring.free[slot], (loaded / kPieces - 1) & 1);
    return ring.piece[slot];
  }
  DEEP_EP_DEVICE void add(const std::byte* from, const PushedPiece& piece) {
    if (loaded - stored >= stages - 1) store_oldest();
    if (loaded >= stages) bulk::wait_read_pending(static_cast<int>(stored - (loaded - stages) - 1));
    next_slot() = piece;
    const std::uint32_t stage = loaded % stages;
    mbarrier::arrive_expect_bytes(barriers[stage], piece.bytes);
    bulk::load(data + stage * stage_bytes, from, piece.bytes, barriers[stage]);
    ++loaded;
  }
  DEEP_EP_DEVICE void store_oldest() {
    const std::uint32_t stage = stored % stages;
    const PushedPiece& piece = ring.piece[stored % kPieces];
    mbarrier::wait(barriers[stage], stored / stages & 1);
    bulk::store(piece.to, data + stage * stage_bytes, piece.bytes);
    bulk::commit();
    ++stored;
    if (stored - told > kUnderWay) complete<kUnderWay>();
  }
  /// Waits until at most `kLeft` stores are under way, and tells the flag raiser about the others.
  template <std::uint32_t kLeft>
  DEEP_EP_DEVICE void complete() {
    bulk::wait<static_cast<int>(kLeft)>();
    bulk::fence_global();
    for (; stored - told > kLeft; ++told) mbarrier::arrive(ring.complete[told % kPieces]);
  }
  DEEP_EP_DEVICE void flush() {
    while (stored < loaded) store_oldest();
    complete<0>();
  }
  /// Tells the flag raiser that no more will come.
  DEEP_EP_DEVICE void finish() {
    flush();
    next_slot() = PushedPiece{nullptr, nullptr, 0, 0};
    mbarrier::arrive(ring.complete[loaded % kPieces]);
  }
};

/// By a whole warp.
struct CombinePusher {
  const CombineParams& params;
  const CombinePeer* peers;
  std::uint64_t epoch;
  int first, step;      ///< rows of each owner that this warp takes
  PushCursor* cursors;  ///< [groups of 32 turns][lanes], between rounds
  PushStages stages;

  DEEP_EP_DEVICE std::int32_t segment_end(int owner) const {
    const std::int32_t end = params.rank_prefix_matrix[owner * params.common.num_ranks + params.common.rank];
    return end < params.num_rows ? end : params.num_rows;
  }
  /// This rank reads its own rows where they lie.
  DEEP_EP_DEVICE int owners() const { return params.common.num_ranks - 1; }
  /// `turn` counts owners: each rank begins with a different one.
  DEEP_EP_DEVICE int owner_of(int turn) const { return (params.common.rank + 1 + turn) % params.common.num_ranks; }
  DEEP_EP_DEVICE PushCursor cursor_at(std::int32_t row, std::int32_t end) const {
    return PushCursor{row, end, row < end ? load_stream(params.recv_src_idx + row) : 0};
  }
  DEEP_EP_DEVICE PushCursor first_row(int turn) const {
    if (turn >= owners()) return PushCursor{0, 0, 0};
    const int owner = owner_of(turn);
    return cursor_at((owner == 0 ? 0 : segment_end(owner - 1)) + first, segment_end(owner));
  }

  /// By one thread.
  DEEP_EP_DEVICE void push_row(int owner, std::int64_t row, std::int32_t token, std::uint64_t round) {
    const PushWindow& window = peers[owner].window;
    std::byte* to = window.row(0, token);
    std::uint64_t* flag = params.common.flag_to(owner, window.slot(token));
    for (std::uint32_t offset = 0; offset < params.row_bytes; offset += stages.stage_bytes) {
      const std::uint32_t rest = params.row_bytes - offset;
      const bool last = rest <= stages.stage_bytes;
      stages.add(params.x + row * params.row_bytes + offset,
                 PushedPiece{to + offset, last ? flag : nullptr, round_signal(epoch, round + 1),
                             last ? rest : stages.stage_bytes});
    }
  }
  /// The lanes write the row's weights after its place; they count as written with its last piece.
  DEEP_EP_DEVICE void push_weights(int owner, std::int64_t row, std::int32_t token) const {
    if (params.topk_weights == nullptr) return;
    if (lane_index() < params.num_topk) {
      auto* weights = reinterpret_cast<float*>(peers[owner].window.row(0, token) + params.row_bytes);
      weights[lane_index()] = load_weak(params.topk_weights + row * params.num_topk + lane_index());
    }
    warp::sync();
  }

  /// Waits until `owner` has room for `round`. By one thread. False after a fault.
  DEEP_EP_DEVICE bool await_credit(int owner, std::uint64_t round) {
    const CombinePeer& peer = peers[owner];
    if (peer.num_tokens <= peer.window.tokens || round < kWindowRounds) return true;
    const std::uint64_t* signal = params.common.signal_from(owner, IntranodeSignal::combine_credit);
    const std::uint64_t wanted = round_signal(epoch, round - kWindowRounds + 1);
    const bool has_room = load_acquire<Scope::system>(signal) >= wanted;
    bulk::fence_global();  // what the owner has read may be overwritten by bulk stores
    if (has_room) return true;
    stages.flush();  // rows under way may be what the owner waits for
    if (!wait_signal(ReportLateHere{{params.wait}}, signal, {owner, Wanted::combine_credit, wanted})) return false;
    bulk::fence_global();
    return true;
  }

  /// Rounds that the owner with most tokens takes.
  DEEP_EP_DEVICE std::uint64_t most_rounds() const {
    std::uint64_t rounds = 0;
    for (int turn = 0; turn < owners(); ++turn) {
      const CombinePeer& peer = peers[owner_of(turn)];
      const std::uint64_t needed = peer.num_tokens == 0 ? 0 : peer.window.round_of(peer.num_tokens - 1) + 1;
      rounds = needed > rounds ? needed : rounds;
    }
    return rounds;
  }

  /// Pushes one row of each owner among the 32 from turn `first_turn` on that has one in this round. False: nobody has
  /// any more, or after a fault.
  DEEP_EP_DEVICE bool push_turn(int first_turn, PushCursor& cursor, std::uint64_t round, bool first_of_round,
                                bool& good) {
    const int turn = first_turn + lane_index();
    const bool mine =
        turn < owners() && cursor.row < cursor.end && peers[owner_of(turn)].window.round_of(cursor.token) == round;
    const std::uint32_t owners = warp::ballot(mine);
    for (std::uint32_t left = owners; left != 0 && good; left &= left - 1) {
      const int lane = lowest_bit(left);
      const int owner = owner_of(first_turn + lane);
      const std::int32_t row = warp::shuffle(cursor.row, lane);
      const std::int32_t token = warp::shuffle(cursor.token, lane);
      if (first_of_round) {
        good = warp::agree(lane_index() != 0 || await_credit(owner, round));
      }
      if (!good) return false;
      push_weights(owner, row, token);
      if (lane_index() == 0) push_row(owner, row, token, round);
    }
    if (mine) cursor = cursor_at(cursor.row + step, cursor.end);
    return owners != 0;
  }

  /// Pushes this warp's share. False after a fault.
  DEEP_EP_DEVICE bool push_all() {
    for (int turn = lane_index(); turn - lane_index() < owners(); turn += kWarpSize) cursors[turn] = first_row(turn);
    const std::uint64_t rounds = most_rounds();
    bulk::fence_global();  // the owners' addresses also say that their windows are free for our bulk stores
    bool good = true;
    for (std::uint64_t round = 0; good && round < rounds; ++round) {
      for (int first_turn = 0; good && first_turn < owners(); first_turn += kWarpSize) {
        PushCursor cursor = cursors[first_turn + lane_index()];  // nobody else's
        // Owners in turn, so that each gets the rows of its first tokens first and can begin to add.
        bool first_of_round = true;
        while (push_turn(first_turn, cursor, round, first_of_round, good)) first_of_round = false;
        cursors[first_turn + lane_index()] = cursor;
      }
    }
    push_nothing();
    return good;
  }
  /// No more will come.
  DEEP_EP_DEVICE bool push_nothing() {
    if (lane_index() == 0) stages.finish();
    warp::sync();
    return true;
  }
};

/// Raises the flags of rows that the block's pushing warps (at most 32, one lane each) have brought to their owners.
DEEP_EP_DEVICE void raise_flags(const CombineShared& shared) {
  constexpr std::uint32_t kPieces = PushedRing::kPieces;
  bool finished = lane_index() >= shared.pushing_warps;
  PushedRing& ring = shared.rings[finished ? 0 : lane_index()];
  std::uint32_t raised = 0;
  for (int spins = 1; !warp::all(finished); ++spins) {
    std::uint32_t complete = raised;
    while (!finished && complete - raised < kPieces &&
           mbarrier::test(ring.complete[complete % kPieces], complete / kPieces & 1)) {
      ++complete;
    }
    if (!warp::any(complete != raised)) {
      pause(spins);
      continue;
    }
    fence<Scope::system>();  // one for all rows that came in meanwhile
    for (; raised != complete; ++raised) {
      const PushedPiece& piece = ring.piece[raised % kPieces];
      finished = piece.to == nullptr;
      if (piece.flag != nullptr) store_relaxed<Scope::system>(piece.flag, piece.flag_value);
      mbarrier::arrive(ring.free[raised % kPieces]);
    }
    spins = 0;
  }
}

}  // namespace deep_ep::device
