// Arguments of the intranode kernels. Plain data: host code fills it, kernels read it.
#pragma once

#include <cstdint>

#include "kernels/common/call.hpp"
#include "kernels/common/faults.hpp"
#include "kernels/common/numbering.hpp"
#include "kernels/common/row_pipe.hpp"
#include "kernels/common/rows.hpp"
#include "kernels/common/topk.hpp"
#include "kernels/intranode/control_window.hpp"

namespace deep_ep {

/// This rank's own counters, in device memory. Zero when the buffer is made.
struct KernelState {
  CallCounter notify, dispatch, combine, barrier, load_balance;
  // Blocks (or warps) that have arrived; the last to arrive sets it back to zero.
  std::uint32_t dispatch_round_ticket;
  std::uint32_t dispatch_drain_ticket;
  std::uint32_t combine_round_ticket[kWindowRounds];  ///< in turn: as many rounds may be under way at once
  // Of blocks of the second interface's dispatch: those that tell selections, those that number them.
  std::uint32_t telling_ticket, selections_ticket;
  std::uint64_t selections_counted;  ///< the last call in which all of the latter have counted
  // The next token, or part of one, that a warp may take; zero between calls. SMs differ in speed: if tokens were
  // shared out beforehand, the call would be as slow as the slowest.
  std::uint32_t dispatch_next_token;
  std::uint32_t combine_next_part;
  std::uint32_t elastic_next_row;         ///< to be pushed
  std::uint32_t load_balance_next_piece;  ///< of an expert
};

/// What every kernel of the family gets.
struct IntranodeParams {
  int rank = 0;
  int num_ranks = 0;
  std::byte* const* heaps = nullptr;  ///< heap base of every rank as this rank maps it; readable by kernels
  ControlWindow control;
  KernelState* state = nullptr;

  DEEP_EP_DEVICE std::byte* own_heap() const { return heaps[rank]; }
  /// What this rank raises at `peer`.
  DEEP_EP_DEVICE std::uint64_t* signal_to(int peer, IntranodeSignal kind) const {
    return control.signal(heaps[peer], kind, rank);
  }
  /// What `peer` raises here.
  DEEP_EP_DEVICE const std::uint64_t* signal_from(int peer, IntranodeSignal kind) const {
    return control.signal(own_heap(), kind, peer);
  }
  /// Of a row pushed into `slot` of a window: the flag that this rank raises at `owner`, the one that `source` raises
  /// here.
  DEEP_EP_DEVICE std::uint64_t* flag_to(int owner, int slot) const {
    return control.pushed_flag(heaps[owner], rank, slot);
  }
  DEEP_EP_DEVICE const std::uint64_t* flag_from(int source, int slot) const {
    return control.pushed_flag(own_heap(), source, slot);
  }
  /// What `source` has told this rank in call `epoch` of notify.
  DEEP_EP_DEVICE NotifySlot counts_from(int source, std::uint64_t epoch) const {
    return control.notify_slot(own_heap(), epoch, source);
  }
};

struct NotifyParams : NotifyCall {
  IntranodeParams common;
};

/// Shared memory of a notify block.
struct NotifyShared {
  std::int64_t unknown_expert;  ///< of the block that tells: see CallShape
  device::Numbering numbering;
  std::int32_t scratch;
};

struct DispatchParams : SentRows {
  IntranodeParams common;
  WaitContext wait;
  const std::int32_t* destination_row;     ///< [num_tokens, num_ranks]
  const std::int32_t* rank_prefix_matrix;  ///< [num_ranks, num_ranks]

  // Where this rank receives.
  RowTargets output;          ///< final places
  std::int64_t output_rows;   ///< rows there is room for
  std::uint32_t window_rows;  ///< 0: output lies in the heap, peers write there. Otherwise, how many rows a source may
                              ///< have in the window at once
  RowTargets window;          ///< parts of the window, [num_ranks * window_rows] rows each

  // Pipeline of a warp, in shared memory.
  std::uint32_t stage_bytes;  ///< a row travels in pieces of at most this size, multiple of 128
  int stages;                 ///< 2..8
};

/// Rows that lie in the window, and where they are to stay.
struct CopyReceivedParams {
  RowShape rows;
  RowTargets from, to;  ///< without what is not wanted
  std::int64_t num_rows;
  const std::int32_t* num_valid;  ///< on the device: how many rows came; of the others only selections are copied

  // Pipeline of a warp, in shared memory.
  std::uint32_t stage_bytes;  ///< multiple of 128
  int stages;                 ///< 2..8
};

/// A window for rows that others push: a part for each source, with room for `tokens` of its rows, which take turns.
/// Behind a row lie its weights.
struct PushWindow {
  std::byte* rows;
  std::uint32_t stride;           ///< from a row to the next, whole lines
  std::int32_t tokens;            ///< in the window at once
  std::int32_t tokens_per_round;  ///< `tokens` when everything fits at once, else a kWindowRounds-th of it

  DEEP_EP_HOST_DEVICE static std::uint32_t stride_for(std::uint32_t row_bytes, int num_topk) {
    return static_cast<std::uint32_t>(align_to_line(row_bytes + static_cast<std::size_t>(num_topk) * sizeof(float)));
  }
  DEEP_EP_DEVICE std::int32_t slot(std::int32_t token) const { return token % tokens; }
  /// The row of `token` in the part of `source`.
  DEEP_EP_DEVICE std::byte* row(int source, std::int32_t token) const {
    return rows + (std::int64_t{source} * tokens + slot(token)) * stride;
  }
  DEEP_EP_DEVICE std::byte* part(int source) const { return row(source, 0); }
  DEEP_EP_DEVICE std::uint64_t round_of(std::int32_t token) const {
    return static_cast<std::uint64_t>(token / tokens_per_round);
  }
};

struct CombineParams {
  IntranodeParams common;
  WaitContext wait;

  // As owner: what is added up.
  int num_tokens;
  std::uint32_t row_bytes;              ///< 2 * hidden, multiple of 16
  const std::int32_t* destination_row;  ///< [num_tokens, num_ranks]
  const std::byte* bias[2];             ///< nullptr: none
  std::byte* combined_x;                ///< out, [num_tokens] rows
  float* combined_weights;              ///< out, [num_tokens, num_topk], nullptr: none
  int num_topk;

  // As expert side: where the rows are.
  std::int32_t num_rows;  ///< of x
  const std::byte* x;
  const float* topk_weights;
  const std::int32_t* rank_prefix_matrix;  ///< [num_ranks, num_ranks]
  const std::int32_t* recv_src_idx;        ///< push only
  bool push;                               ///< false: x and topk_weights lie in the heap and peers read them

  PushWindow window;  ///< this rank's, for rows that peers push: a part for each of them

  // Roles of a block's warps, in this order: some add, and where this rank pushes, some push and one raises flags.
  int adding_warps;
  int parts_per_token;  ///< a token is added in so many parts, by different warps
  int pushing_warps;
  int pushing_blocks;         ///< only in so many blocks: rows from too many senders at once hold each other up
  int stages;                 ///< of a pushing warp, 2..8
  std::uint32_t stage_bytes;  ///< a pushed row travels in pieces of at most this size, multiple of 128
};

}  // namespace deep_ep
