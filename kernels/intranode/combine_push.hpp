// The pushing warps of combine: in each, one thread moves rows of this rank through stages in shared memory into the
// windows of their owners. One more warp raises the rows' flags once they are complete there: the fence that this takes
// waits for answers from all peers, and would hold up whoever moves rows.
//
// A window holds `window_tokens` tokens. An owner with more works in rounds of half as many, so that one half is filled
// while the other is added up; rounds are pushed in the same order by all ranks, which keeps credits free of cycles.
#pragma once

#include "kernels/intranode/combine_shared.hpp"
#include "kernels/primitives/bulk.hpp"
#include "kernels/primitives/signal.hpp"
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

  /// The next slot of the ring, once the flag raiser has done with it.
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
  /// Waits until at most `kLeft` stores are under way, and tells the flag raiser of the others.
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

struct CombinePusher {
  const CombineParams& params;
  const CombinePeer* peers;
  std::uint64_t epoch;
  int first, step;      ///< rows of each owner and round that this warp takes
  PushedRange* ranges;  ///< [num_ranks], of the present round
  PushStages stages;

  DEEP_EP_DEVICE std::int32_t segment_end(int owner) const {
    const std::int32_t end = params.rank_prefix_matrix[owner * params.common.num_ranks + params.common.rank];
    return end < params.num_rows ? end : params.num_rows;
  }
  /// First row in [begin, end), which holds ascending token indices, of a token not below `token`.
  DEEP_EP_DEVICE std::int32_t lower_bound(std::int32_t begin, std::int32_t end, std::int64_t token) const {
    while (begin < end) {
      const std::int32_t middle = begin + (end - begin) / 2;
      if (params.recv_src_idx[middle] < token) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    return begin;
  }
  /// Our rows of the tokens that `owner` adds in `round`.
  DEEP_EP_DEVICE PushedRange rows_in_round(int owner, std::uint64_t round) const {
    const CombinePeer& peer = peers[owner];
    const std::int64_t first_token = static_cast<std::int64_t>(round) * peer.tokens_per_round;
    const std::int64_t end_token = first_token + peer.tokens_per_round;
    const std::int32_t begin = owner == 0 ? 0 : segment_end(owner - 1);
    const std::int32_t end = segment_end(owner);
    return PushedRange{first_token == 0 ? begin : lower_bound(begin, end, first_token),
                       end_token >= peer.num_tokens ? end : lower_bound(begin, end, end_token)};
  }

  DEEP_EP_DEVICE void push_row(int owner, std::int64_t row, std::int32_t token, std::uint64_t round) {
    const CombinePeer& peer = peers[owner];
    const int slot = token % peer.window_tokens;
    std::byte* to = peer.window + std::int64_t{slot} * peer.window_row_bytes;
    if (params.topk_weights != nullptr) {
      auto* weights = reinterpret_cast<float*>(to + params.row_bytes);
      for (int k = 0; k < params.num_topk; ++k) weights[k] = params.topk_weights[row * params.num_topk + k];
    }
    std::uint64_t* flag = params.common.control.pushed_flag(params.common.heaps[owner], params.common.rank, slot);
    for (std::uint32_t offset = 0; offset < params.row_bytes; offset += stages.stage_bytes) {
      const std::uint32_t rest = params.row_bytes - offset;
      const bool last = rest <= stages.stage_bytes;
      stages.add(params.x + row * params.row_bytes + offset,
                 PushedPiece{to + offset, last ? flag : nullptr, round_signal(epoch, round + 1),
                             last ? rest : stages.stage_bytes});
    }
  }

  /// Waits until `owner` has room for `round`. False after a fault.
  DEEP_EP_DEVICE bool await_credit(int owner, std::uint64_t round) {
    const CombinePeer& peer = peers[owner];
    if (peer.num_tokens <= peer.window_tokens || round < 2) return true;
    const IntranodeParams& common = params.common;
    const std::uint64_t* signal =
        common.control.signal(common.heaps[common.rank], ControlWindow::Signal::combine_credit, owner);
    if (load_acquire<Scope::system>(signal) >= round_signal(epoch, round - 1)) return true;
    stages.flush();  // rows under way may be what the owner waits for
    return wait_signal(signal, round_signal(epoch, round - 1), params.wait, owner, Wanted::combine_credit);
  }

  /// Rounds that the owner with most tokens takes.
  DEEP_EP_DEVICE std::uint64_t most_rounds() const {
    std::uint64_t rounds = 0;
    for (int owner = 0; owner < params.common.num_ranks; ++owner) {
      const CombinePeer& peer = peers[owner];
      const auto needed =
          static_cast<std::uint64_t>((peer.num_tokens + peer.tokens_per_round - 1) / peer.tokens_per_round);
      rounds = needed > rounds ? needed : rounds;
    }
    return rounds;
  }

  /// Pushes this warp's share. By one thread. False after a fault.
  DEEP_EP_DEVICE bool push_all() {
    const int num_ranks = params.common.num_ranks;
    const std::uint64_t rounds = most_rounds();
    bool good = true;
    for (std::uint64_t round = 0; good && round < rounds; ++round) {
      std::int32_t most = 0;
      for (int owner = 0; owner < num_ranks; ++owner) {
        ranges[owner] = rows_in_round(owner, round);
        const std::int32_t rows = ranges[owner].end - ranges[owner].begin;
        good = good && (rows == 0 || await_credit(owner, round));
        most = rows > most ? rows : most;
      }
      bulk::fence_global();  // what the owners have read may be overwritten by bulk stores
      // Owners in turn, so that each gets the rows of its first tokens first and can begin to add. Everybody starts
      // with another one.
      for (std::int32_t index = first; good && index < most; index += step) {
        for (int turn = 1; turn <= num_ranks; ++turn) {
          const int owner = (params.common.rank + turn) % num_ranks;
          const std::int32_t row = ranges[owner].begin + index;
          if (row < ranges[owner].end) push_row(owner, row, params.recv_src_idx[row], round);
        }
      }
    }
    stages.finish();
    return good;
  }
};

/// Raises the flags of rows that the block's pushing warps (at most 32, a lane each) have brought to their owners.
DEEP_EP_DEVICE void raise_flags(const CombineShared& layout, std::byte* memory) {
  constexpr std::uint32_t kPieces = PushedRing::kPieces;
  bool finished = lane_index() >= layout.pushing_warps;
  PushedRing& ring = *layout.ring(memory, finished ? 0 : lane_index());
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
    fence<Scope::system>();  // one for all rows that have come in meanwhile
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
