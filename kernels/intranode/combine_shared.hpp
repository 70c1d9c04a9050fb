// Shared memory of a combine block: what the peers said, and the stages of the pushing warps.
#pragma once

#include "kernels/intranode/params.hpp"
#include "kernels/primitives/mbarrier.hpp"
#include "kernels/primitives/target.hpp"

namespace deep_ep {

/// What a block knows of one peer.
struct CombinePeer {
  // As the expert side of our tokens.
  const std::byte* x;  ///< its rows, readable by us; nullptr: it pushes them into our window
  const float* topk_weights;
  std::int32_t num_rows;  ///< that it holds; fewer than it was sent, if num_worst_tokens was too small
  // As the owner of rows that we hold.
  std::byte* window;  ///< our part of its window
  std::uint32_t window_row_bytes;
  std::int32_t window_tokens;
  std::int32_t tokens_per_round;
  std::int32_t num_tokens;
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
  int num_ranks, pushing_warps, stages;
  std::uint32_t stage_bytes;

  DEEP_EP_HOST_DEVICE static std::size_t align(std::size_t bytes) { return (bytes + 127) / 128 * 128; }
  DEEP_EP_HOST_DEVICE std::size_t barriers_at() const {
    return align(128 + sizeof(CombinePeer) * static_cast<std::size_t>(num_ranks));
  }
  DEEP_EP_HOST_DEVICE std::size_t rings_at() const {
    return align(barriers_at() + sizeof(device::Mbarrier) * static_cast<std::size_t>(pushing_warps * stages));
  }
  DEEP_EP_HOST_DEVICE std::size_t cursors_at() const {
    return align(rings_at() + sizeof(PushedRing) * static_cast<std::size_t>(pushing_warps));
  }
  /// One per owner, filled up to whole warps.
  DEEP_EP_HOST_DEVICE int cursors_each() const { return (num_ranks + 31) / 32 * 32; }
  DEEP_EP_HOST_DEVICE std::size_t stages_at() const {
    return align(cursors_at() + sizeof(PushCursor) * static_cast<std::size_t>(pushing_warps * cursors_each()));
  }
  DEEP_EP_HOST_DEVICE std::size_t bytes() const {
    return stages_at() + static_cast<std::size_t>(pushing_warps * stages) * stage_bytes;
  }

  DEEP_EP_HOST_DEVICE std::int32_t* scratch(std::byte* memory) const { return reinterpret_cast<std::int32_t*>(memory); }
  DEEP_EP_HOST_DEVICE CombinePeer* peers(std::byte* memory) const {
    return reinterpret_cast<CombinePeer*>(memory + 128);
  }
  DEEP_EP_HOST_DEVICE device::Mbarrier* stage_barriers(std::byte* memory, int pusher) const {
    return reinterpret_cast<device::Mbarrier*>(memory + barriers_at()) + pusher * stages;
  }
  DEEP_EP_HOST_DEVICE PushedRing* ring(std::byte* memory, int pusher) const {
    return reinterpret_cast<PushedRing*>(memory + rings_at()) + pusher;
  }
  DEEP_EP_HOST_DEVICE PushCursor* cursors(std::byte* memory, int pusher) const {
    return reinterpret_cast<PushCursor*>(memory + cursors_at()) + pusher * cursors_each();
  }
  DEEP_EP_HOST_DEVICE std::byte* first_stage(std::byte* memory, int pusher) const {
    return memory + stages_at() + static_cast<std::size_t>(pusher * stages) * stage_bytes;
  }
};

}  // namespace deep_ep
