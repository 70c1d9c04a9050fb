// Arguments of the intranode kernels. Plain data: host code fills it, kernels read it.
#pragma once

#include <cstdint>

#include "kernels/common/faults.hpp"
#include "kernels/intranode/control_window.hpp"

namespace deep_ep {

/// What the host waits for in a dispatch with exact sizes. In memory that host and kernel share.
struct HostCounts {
  std::uint64_t epoch;  ///< stored last, with release order
  std::int32_t num_recv_tokens;
  std::int32_t tokens_per_expert[1];  ///< [local experts], aligned as asked; allocated behind the struct
};

struct NotifyParams {
  IntranodeParams common;
  WaitContext wait;
  CallShape shape;
  int num_tokens;
  int num_local_experts;
  int expert_alignment;
  const std::uint8_t* is_token_in_rank;       ///< [num_tokens, num_ranks]
  const std::int32_t* num_tokens_per_rank;    ///< [num_ranks], checked against the membership
  const std::int32_t* num_tokens_per_expert;  ///< [num_experts]
  std::int32_t* destination_row;              ///< out, [num_tokens, num_ranks]
  std::int32_t* rank_prefix_matrix;           ///< out, [num_ranks, num_ranks]
  HostCounts* host_counts;                    ///< out, nullptr when the host does not wait
};

/// Where a rank wants its rows: in the heap (final place or window), or, for draining, in its own memory.
struct RowTargets {
  std::byte* x;
  std::byte* scales;  ///< [rows, num_scales] 4-byte words
  std::byte* topk_idx;
  float* topk_weights;
  std::int32_t* src_idx;
};

struct DispatchParams {
  IntranodeParams common;
  WaitContext wait;

  // What is sent.
  int num_tokens;
  const std::byte* x;           ///< [num_tokens] rows of row_bytes
  std::uint32_t row_bytes;      ///< multiple of 16
  const std::uint32_t* scales;  ///< nullptr: none
  int num_scales;
  std::int64_t scale_token_stride, scale_stride;  ///< in words
  const void* topk_idx;                           ///< nullptr: none
  const float* topk_weights;
  int num_topk;
  bool topk_idx_is_64_bit;
  int num_local_experts;
  const std::int32_t* destination_row;     ///< [num_tokens, num_ranks]
  const std::int32_t* rank_prefix_matrix;  ///< [num_ranks, num_ranks]
  bool send_src_idx;                       ///< false when a handle already knows it

  // Where this rank receives.
  RowTargets output;          ///< final places
  std::int64_t output_rows;   ///< rows there is room for
  bool fill_tail;             ///< worst case: topk_idx of the rows beyond the last one becomes -1
  std::uint32_t window_rows;  ///< 0: output lies in the heap, peers write there. Otherwise, how many rows a source may
                              ///< have in the window at once
  RowTargets window;          ///< parts of the window, [num_ranks * window_rows] rows each

  // Pipeline of a warp, in shared memory.
  std::uint32_t stage_bytes;  ///< a row travels in pieces of at most this size, multiple of 128
  int stages;                 ///< 2..8
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

  // This rank's window for rows that peers push: [num_ranks][window_tokens] rows.
  std::byte* window;
  std::uint32_t window_row_bytes;  ///< row, then weights, padded to a line
  int window_tokens;               ///< tokens in the window at once
  int tokens_per_round;            ///< window_tokens when everything fits at once, else a kWindowRounds-th of it

  // Roles of a block's warps, in this order: some add, and where this rank pushes, some push and one raises flags.
  int adding_warps;
  int parts_per_token;  ///< a token is added in so many parts, by different warps
  int pushing_warps;
  int pushing_blocks;         ///< only in so many blocks: rows from too many senders at once hold each other up
  int stages;                 ///< of a pushing warp, 2..8
  std::uint32_t stage_bytes;  ///< a pushed row travels in pieces of at most this size, multiple of 128
};

}  // namespace deep_ep
