// Low-latency dispatch and combine, for decoding: few tokens, no host wait, CUDA graphs, receive hooks.
//
// Symbols as in buffer.hpp, and L = E / R local experts, M = max_tokens, equal on all ranks; T <= M may differ.
//
// A call has two parts: *send* and *receive*. They run as one kernel, or, with `return_recv_hook`, as two: the call
// enqueues the first, the hook the second. Outputs, counts and statistics hold only behind the receive part, in stream
// order. Of each kind (dispatch, combine) two calls may wait for their hooks at once; hooks may be called late and in
// any order: calling one first enqueues the receive parts of the same kind that were sent before it.
//
// Kernels run where and when those of all calls do (buffer.hpp); a hook is a call on the stream that the send part was
// called with. A call without a hook first enqueues the receive parts of its kind that still wait for theirs. All ranks
// make the same calls in the same order; when hooks are called is up to each. Both parts of a call are recorded into
// the same CUDA graph, or neither: otherwise the hook, or the next call without one, throws InvalidArgument.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "deep_ep/config.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep {

enum class LowLatencyLayout : std::uint8_t {
  expert_major,  ///< a row for each (token, local expert): recv_x [L, R * M, H]
  rank_major,    ///< a row for each token: recv_x [R, M, H] by source rank, with the row's local experts beside it
};

/// What combine needs to know of a dispatch. Copies share the tensors.
struct LowLatencyHandle {
  /// expert_major: [L, R * M] int32, token index at its source for each valid row; rank_major: [R, M] int32.
  Tensor src_info;
  /// expert_major: [L, R] int64, (first row << 32) | rows, of each source. rank_major: [R] int64 likewise (first row
  /// 0).
  Tensor layout_range;
  /// [1 + M + M * K, R] int32 in the order of kernels/low_latency/params.hpp: rows of each source, their tokens, and
  /// where each selection's row lies in recv_x (-1: on another rank).
  Tensor row_table;
  LowLatencyLayout layout = LowLatencyLayout::expert_major;
  int max_tokens = 0;
  int num_topk = 0;
  int num_experts = 0;
  std::int64_t hidden = 0;
};

struct LowLatencyDispatchArguments {
  TensorView x;                            ///< [T, H] bfloat16 contiguous, H a multiple of 128 (512 with use_ue8m0)
  TensorView topk_idx;                     ///< [T, K] int32 or int64 contiguous, K <= 32; negative = no selection
  std::optional<TensorView> topk_weights;  ///< [T, K] float32; rank_major only: travels with the rows
  int max_tokens = 0;                      ///< M
  int num_experts = 0;                     ///< E, a multiple of R, at most 65535
  bool use_fp8 = true;                     ///< cast each 128 channels to float8_e4m3 with a float32 scale of their own
  bool round_scale = false;                ///< scales are powers of two
  bool use_ue8m0 = false;                  ///< scales are packed as exponents, four in an int32; needs round_scale
  LowLatencyLayout layout = LowLatencyLayout::expert_major;
  /// [L] int32: rows received by each expert are added.
  std::optional<TensorView> cumulative_local_expert_recv_stats;
  /// [R] int64: clock cycles spent waiting for each source are added.
  std::optional<TensorView> wait_recv_cost_stats;
  Config config;
};

struct LowLatencyDispatchResult {
  /// expert_major: [L, R * M, H], rows 0 .. recv_count[l] - 1 of each expert are valid, by source rank, then by token.
  /// rank_major: [R, M, H], rows 0 .. recv_count[s] - 1 of each source are valid, by token. bfloat16 or float8_e4m3.
  Tensor recv_x;
  /// float32 [.., .., H / 128] or int32 [.., .., H / 512]; the last two dimensions are column-major.
  std::optional<Tensor> recv_x_scales;
  Tensor recv_count;  ///< int32: [L] (expert_major) or [R] (rank_major)
  /// rank_major: [R, M, K] int32 local expert of each selection, -1: on another rank or none.
  std::optional<Tensor> recv_topk_idx;
  std::optional<Tensor>
      recv_topk_weights;  ///< rank_major, where weights were sent: [R, M, K] float32, 0 where idx is -1
  LowLatencyHandle handle;
  EventHandle event;           ///< set with async_finish
  std::function<void()> hook;  ///< set with return_recv_hook: enqueues the receive part; a second call does nothing
};

struct LowLatencyCombineArguments {
  /// Shape of the dispatch's recv_x, bfloat16, contiguous. Only valid rows are read. rank_major: each row already is
  /// the weighted sum over its local experts.
  TensorView x;
  TensorView topk_idx;      ///< [T, K]: as dispatched; a selection that has since become negative is left out
  TensorView topk_weights;  ///< [T, K] float32 contiguous (expert_major: applied to the rows)
  const LowLatencyHandle* handle = nullptr;
  bool use_logfmt = false;                         ///< rows travel in LogFMT-10 where their range allows
  std::optional<TensorView> out;                   ///< [T, H] bfloat16 contiguous: written and returned
  std::optional<TensorView> wait_recv_cost_stats;  ///< [R] int64, as for dispatch
  Config config;
};

struct LowLatencyCombineResult {
  /// [T, H] bfloat16. Each rank sums its experts' rows in fp32, selections ascending, and rounds; the owner sums the
  /// ranks' parts in fp32, ranks ascending, and rounds again. Bitwise reproducible.
  Tensor combined_x;
  EventHandle event;
  std::function<void()> hook;
};

}  // namespace deep_ep
