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

/// Stages in a ring. Loads run ahead of stores; a stage is free once its store has read it; stores complete later.
struct PushRing {
  static constexpr std::uint32_t kUnderWay = 6;  ///< stores that need not be complete when the next is issued
  Mbarrier* barriers;
  PushProgress* progress;
  std::byte* data;
  std::uint32_t stages, stage_bytes;
  std::uint32_t loaded = 0, stored = 0;
  std::uint32_t told = 0;  ///< what `complete` of the progress says

  DEEP_EP_DEVICE void add(const std::byte* from, const PushedPiece& piece) {
    if (loaded - stored >= stages - 1) store_oldest();
    if (loaded >= stages) bulk::wait_read_pending(static_cast<int>(stored - (loaded - stages) - 1));
    for (int spins = 1; loaded - load_acquire<Scope::block>(&progress->flagged) >= PushProgress::kPieces; ++spins) {
      pause(spins);  // for the flag raiser, which waits for nobody but us
    }
    const std::uint32_t stage = loaded % stages;
    progress->piece[loaded % PushProgress::kPieces] = piece;
    mbarrier::arrive_expect_bytes(barriers[stage], piece.bytes);
    bulk::load(data + stage * stage_bytes, from, piece.bytes, barriers[stage]);
    ++loaded;
  }
  DEEP_EP_DEVICE void store_oldest() {
    const std::uint32_t stage = stored % stages;
    const PushedPiece& piece = progress->piece[stored % PushProgress::kPieces];
    mbarrier::wait(barriers[stage], stored / stages & 1);
    bulk::store(piece.to, data + stage * stage_bytes, piece.bytes);
    bulk::commit();
    ++stored;
    if (stored > kUnderWay) complete<kUnderWay>();
  }
  /// Waits until at most `kLeft` stores are under way, and tells the flag raiser.
  template <std::uint32_t kLeft>
  DEEP_EP_DEVICE void complete() {
    const std::uint32_t reached = stored - kLeft;
    if (static_cast<std::int32_t>(reached - told) <= 0) return;  // a flush has told more: the count must not fall back
    bulk::wait<static_cast<int>(kLeft)>();
    bulk::fence_global();
    store_release<Scope::block>(&progress->complete, reached);
    told = reached;
  }
  DEEP_EP_DEVICE void flush() {
    while (stored < loaded) store_oldest();
    complete<0>();
  }
};

struct CombinePusher {
  const CombineParams& params;
  const CombinePeer* peers;
  std::uint64_t epoch;
  int first, step;      ///< rows of each owner and round that this warp takes
  PushedRange* ranges;  ///< [num_ranks], of the present round
  PushRing ring;

  DEEP_EP_DEVICE std::int32_t segment_end(int owner) const {
    return params.rank_prefix_matrix[owner * params.common.num_ranks + params.common.rank];
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
    for (std::uint32_t offset = 0; offset < params.row_bytes; offset += ring.stage_bytes) {
      const std::uint32_t rest = params.row_bytes - offset;
      const bool last = rest <= ring.stage_bytes;
      ring.add(params.x + row * params.row_bytes + offset,
               PushedPiece{to + offset, last ? flag : nullptr, round_signal(epoch, round + 1),
                           last ? rest : ring.stage_bytes});
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
    ring.flush();  // rows under way may be what the owner waits for
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
    ring.flush();
    store_release<Scope::block>(&ring.progress->finished, std::uint32_t{1});
    return good;
  }
};

/// Raises the flags of rows that the block's pushing warps (at most 32, a lane each) have brought to their owners.
DEEP_EP_DEVICE void raise_flags(const CombineShared& layout, std::byte* memory) {
  const bool serves = lane_index() < layout.pushing_warps;
  PushProgress* progress = layout.progress(memory, serves ? lane_index() : 0);
  std::uint32_t raised = 0;
  for (int spins = 1;; ++spins) {
    const bool finished = !serves || load_acquire<Scope::block>(&progress->finished) != 0;
    const std::uint32_t complete = serves ? load_acquire<Scope::block>(&progress->complete) : 0;
    if (warp::any(complete != raised)) {
      fence<Scope::system>();  // one for all rows that have come in meanwhile
      for (; raised != complete; ++raised) {
        const PushedPiece& piece = progress->piece[raised % PushProgress::kPieces];
        if (piece.flag != nullptr) store_relaxed<Scope::system>(piece.flag, piece.flag_value);
      }
      if (serves) store_release<Scope::block>(&progress->flagged, raised);
      spins = 0;
    }
    if (warp::all(finished)) return;
    pause(spins);
  }
}

}  // namespace deep_ep::device
