// Shared memory of a combine block: what the peers said, and the stages of the pushing warps.
#pragma once

#include "kernels/intranode/params.hpp"
#include "kernels/primitives/mbarrier.hpp"

namespace deep_ep {

/// What a block knows of one peer.
struct CombinePeer {
  // As the expert side of our tokens.
  const std::byte* x;  ///< its rows, readable by us
  const float* topk_weights;
  bool pushes;            ///< them into our window; x and topk_weights mean nothing
  std::int32_t num_rows;  ///< that it holds; fewer than it was sent, if num_worst_tokens was too small
  // As the owner of rows that we hold.
  std::int32_t num_tokens;
  PushWindow window;  ///< its first part is ours
};

/// Of the rows that a pushing warp brings to one owner: the next, the end, and whose token the next one is.
struct PushCursor {
  std::int32_t row, end;
  std::int32_t token;
};

/// A piece on its way to an owner's window.
struct PushedPiece {
  std::byte* to;        ///< nullptr: the pushing warp has no more
  std::uint64_t* flag;  ///< of the row, on its last piece
  std::uint64_t flag_value;
  std::uint32_t bytes;
};

/// Between a pushing warp and the one that raises its flags: a ring of pieces. `complete` of a slot ends a phase when
/// the piece has arrived at its owner, `free` when its flag is up.
struct PushedRing {
  static constexpr std::uint32_t kPieces = 32;
  PushedPiece piece[kPieces];
  device::Mbarrier complete[kPieces];
  device::Mbarrier free[kPieces];
};

struct CombineShared {
  std::int32_t* scratch;
  CombinePeer* peers;  ///< [num_ranks]
  // Of each pushing warp.
  device::Mbarrier* barriers;  ///< [stages]
  PushedRing* rings;
  PushCursor* cursors;  ///< one per owner, filled up to whole warps
  std::byte* stages;
  std::size_t bytes;
  int pushing_warps, num_stages, owners;
  std::uint32_t stage_bytes;

  DEEP_EP_HOST_DEVICE CombineShared(Carver carver, int num_ranks, int pushing_warps, int num_stages,
                                    std::uint32_t stage_bytes)
      : scratch(carver.take<std::int32_t>()),
        peers(carver.take<CombinePeer>(static_cast<std::size_t>(num_ranks), kLine)),
        barriers(carver.take<device::Mbarrier>(static_cast<std::size_t>(pushing_warps * num_stages), kLine)),
        rings(carver.take<PushedRing>(static_cast<std::size_t>(pushing_warps), kLine)),
        cursors(carver.take<PushCursor>(static_cast<std::size_t>(pushing_warps * whole_warps(num_ranks)), kLine)),
        stages(carver.take<std::byte>(static_cast<std::size_t>(pushing_warps * num_stages) * stage_bytes, kLine)),
        bytes(carver.bytes()),
        pushing_warps(pushing_warps),
        num_stages(num_stages),
        owners(whole_warps(num_ranks)),
        stage_bytes(stage_bytes) {}

  DEEP_EP_DEVICE device::Mbarrier* barriers_of(int pusher) const { return barriers + pusher * num_stages; }
  DEEP_EP_DEVICE PushCursor* cursors_of(int pusher) const { return cursors + pusher * owners; }
  DEEP_EP_DEVICE std::byte* stages_of(int pusher) const {
    return stages + static_cast<std::size_t>(pusher * num_stages) * stage_bytes;
  }

 private:
  DEEP_EP_HOST_DEVICE static int whole_warps(int threads) {
    return (threads + device::kWarpSize - 1) / device::kWarpSize * device::kWarpSize;
  }
};

}  // namespace deep_ep
