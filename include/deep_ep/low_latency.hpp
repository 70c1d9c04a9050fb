// Low-latency dispatch and combine, for decoding: few tokens, no host wait, CUDA graphs, receive hooks; within a node
// and between nodes. They need a buffer with BufferOptions::low_latency.bytes.
//
// Symbols as in buffer.hpp, and L = E / R local experts, M = max_tokens, equal on all ranks; T <= M may differ.
//
//   dispatch:  token -> one row for each rank that owns one of its experts -> recv_x
//   (experts)  recv_x -> rows of the same shape
//   combine:   rows -> one partial sum for each rank (or, with hooks, as they are) -> the owner adds them -> combined_x
//
// A call has two parts: *send* and *receive*. They run as one kernel, or, with `return_recv_hook`, as two: the call
// enqueues the first, and result.hook() the second. In between no SM is taken. Outputs, counts and statistics hold only
// after the receive part, in stream order; inputs must stay alive and unchanged until then. Of each kind (dispatch,
// combine) two calls may wait for their hooks at once. Hooks may be called late and in any order: each first enqueues
// the receive parts of its kind that were sent earlier. So does a call without a hook.
//
// Streams and order are those of all calls (buffer.hpp); a hook is a call on the stream that its send part was called
// with. All ranks make the same calls in the same order, but each rank calls its hooks when it likes. Both parts of a
// call must be recorded into the same CUDA graph, or neither: otherwise the hook, or the next call without one, throws
// InvalidArgument. A call that throws after it has enqueued its send part has enqueued the receive part as well.
//
// Unless said otherwise a tensor is contiguous (row-major) and lies on the buffer's device.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "deep_ep/arrivals.hpp"
#include "deep_ep/config.hpp"
#include "deep_ep/executor.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// A dispatch, as combine needs to know it. Copies share the tensors.
struct LowLatencyHandle {
  /// [L, R * M] int32: token index at its source for each valid row.
  Tensor src_info = {};
  /// [L, R] int64: which rows of recv_x come from which source, as (first row << 32) | number of rows.
  Tensor layout_range = {};
  /// [2 + M + M * K, R] int32, a column for each source: how many tokens it sent; their indices at the source (M
  /// places); and for each of those tokens where the rows of its K selections lie in recv_x (-1: on another rank).
  /// Last, in the first column, the dispatch's number, by which combine finds out that ranks use handles of different
  /// ones.
  Tensor row_table = {};
  int num_tokens = 0;       ///< T, of this rank
  int max_tokens = 0;       ///< M
  int num_topk = 0;         ///< K
  int num_experts = 0;      ///< E
  std::int64_t hidden = 0;  ///< H
};

/// Equal on all ranks: everything but T, the tensors' contents, the statistics, and config.
struct LowLatencyDispatchArguments {
  /// [T, H] bfloat16, from a multiple of 16 bytes on; H a multiple of 128 (of 512 with use_ue8m0).
  ConstTensorView x = {};
  /// [T, K] int32 or int64, K <= 32; negative: no selection. A token may name an expert twice: it gets two rows.
  ConstTensorView topk_idx = {};
  /// M, 1 or more; M * K is at most 65535. For what fits see Buffer::low_latency_bytes_hint.
  int max_tokens = 0;
  int num_experts = 0;  ///< E, a multiple of R, at most 65535
  /// Cast each 128 channels to float8_e4m3 with a float32 scale of their own. Neither this nor use_nvfp4: rows travel
  /// in bfloat16. Both: InvalidArgument.
  bool use_fp8 = true;
  bool round_scale = false;  ///< scales are powers of two; needs use_fp8
  bool use_ue8m0 = false;    ///< scales are exponents, four in an int32, the first lowest; needs round_scale
  /// Casts as quantisers for training do, so that both see the same bits: true divisions, a smaller floor. Without
  /// use_fp8, and with round_scale, it has no effect.
  bool align_fp8_quantization = false;
  /// Cast to NVFP4: each 16 channels to e2m1 with an e4m3 scale of their own. Not with the other forms, so use_fp8 must
  /// be false.
  bool use_nvfp4 = false;
  /// [1] float32, positive, with use_nvfp4: scales are multiplied by it, so a channel is about value * scale /
  /// x_global_scale. None: 1. (448 * 6 / the largest magnitude of all uses the whole range.) Receivers must know the
  /// senders'.
  std::optional<ConstTensorView> x_global_scale = {};
  /// [L] int32: each entry grows by the number of rows that the expert received.
  std::optional<TensorView> cumulative_local_expert_recv_stats = {};
  /// [R] int64: each entry grows by the clock cycles spent waiting for the source.
  std::optional<TensorView> wait_recv_cost_stats = {};
  /// [L, W] int64: words by which another kernel sees, while the call still receives, which rows are there; each stands
  /// for arrival_rows rows, W of them for all. deep_ep/arrivals.hpp says what they hold, and when. InvalidArgument for
  /// a buffer with masking.
  std::optional<TensorView> arrival_counters = {};
  /// A power of two below 2^20, with arrival_counters. 0: W is 1, and a word stands for all rows of its expert.
  int arrival_rows = 0;
  /// Send only; the result's hook enqueues the receive part. Not with CallOptions::async_finish. InvalidArgument when
  /// two dispatches already wait for their hooks.
  bool return_recv_hook = false;
  /// With return_recv_hook: the owner of these tensors. The buffer keeps it until the receive part is enqueued, which a
  /// later call does if the hook was dropped.
  std::shared_ptr<void> owner = {};
  Config config = {};  ///< SMs and warps of this rank's call
};

/// The result of Buffer::low_latency_dispatch; with return_recv_hook the tensors hold it behind the hook only.
struct LowLatencyDispatchResult {
  /// [L, R * M, H] bfloat16 or float8_e4m3; NVFP4: uint8 [L, R * M, H / 2] with the first of two values in the lower
  /// half of a byte. Rows 0 .. recv_count[l] - 1 of each expert are valid, by source rank, then by token. The contents
  /// of the others are undefined.
  Tensor recv_x = {};
  /// float32 [L, R * M, H / 128] or int32 [L, R * M, H / 512] for the rows of recv_x; the last two dimensions are
  /// column-major. NVFP4: uint8 [L, tiles, H / 64, 512], in the order in which tensor cores load them: a tile is 128
  /// rows of recv_x (the last one may be longer than that), and scale c % 4 of row r of a tile lies at 16 * (r % 32) +
  /// 4 * (r / 32) of the 512 bytes for c / 4.
  std::optional<Tensor> recv_x_scales = {};
  Tensor recv_count = {};        ///< [L] int32
  LowLatencyHandle handle = {};  ///< for combine
  EventHandle event = {};        ///< set with async_finish
  /// Set with return_recv_hook: enqueues the receive part; a second call does nothing.
  std::function<void()> hook = {};
};

/// Single-batch overlap: a kernel of the program, on another stream, writes x while combine's send part runs, and
/// raises signals when rows are there. Combine reads a row behind its signal, and sends those that are there first. A
/// signal that is not raised by the deadline ends the call: TimeoutError names it.
struct LowLatencyOverlap {
  /// [n] int32, n >= L * W, where W is R * M / signal_rows, rounded up (1 for 0): element l * W + b stands for rows
  /// b * signal_rows and so on of local expert l. The rows are there once it is at least `expected`, by releases at
  /// the scope of the GPU. Zero before that kernel begins; combine does not reset it. Elements of rows that dispatch
  /// did not bring are not looked at. None: all rows are there.
  std::optional<ConstTensorView> signals = {};
  int signal_rows = 0;  ///< 0: all rows of an expert
  int expected = 1;     ///< 1 or more
  int num_sms = 0;  ///< the send part takes so many at most: the kernel that it waits for needs others. 0: as config
};

/// Equal on all ranks: H, the dispatch that the handle is of, and what that had in common.
/// RankMismatch where they are not.
struct LowLatencyCombineArguments {
  /// The experts' output, bfloat16, rows where the dispatch's recv_x had them, from a multiple of 16 bytes on. Only
  /// valid rows are read. H may differ from the dispatch's.
  ConstTensorView x = {};
  /// [T, K]: as dispatched; a selection that has since become negative is left out. RankMismatch where one names
  /// another expert. (Where its rank got no row of the token at all, TimeoutError names that rank.)
  ConstTensorView topk_idx = {};
  ConstTensorView topk_weights = {};         ///< [T, K] float32: rows are multiplied by them
  const LowLatencyHandle* handle = nullptr;  ///< of the dispatch; any number of combines; used during the call only
  bool use_logfmt = false;  ///< accepted for DeepEP's callers, without effect: rows travel as without it
  /// [T, H] bfloat16, from a multiple of 16 bytes on: written instead of new memory.
  std::optional<TensorView> out = {};
  std::optional<TensorView> wait_recv_cost_stats = {};  ///< [R] int64, as for dispatch
  bool return_recv_hook = false;     ///< as for dispatch; combines are counted separately. Equal on all ranks of a node
  std::shared_ptr<void> owner = {};  ///< as for dispatch
  Config config = {};                ///< SMs and warps of this rank's call
  /// With return_recv_hook. Each rank decides for itself; the results are the same bits. Unsupported where ranks are
  /// reached by RDMA, with masking, and where low_latency.bytes has no room for a row of each selection.
  std::optional<LowLatencyOverlap> overlap = {};
};

/// The result of Buffer::low_latency_combine, as LowLatencyDispatchResult.
struct LowLatencyCombineResult {
  /// [T, H] bfloat16; with `out`, a tensor over that memory, which stays the caller's. Each rank sums its experts' rows
  /// in fp32, selections ascending, and rounds; the owner sums the ranks' parts in fp32, ranks ascending, and rounds
  /// again. With hooks, within a node, without masking, rows may travel as they are: then the owner sums them in fp32,
  /// selections ascending, and rounds once. Bitwise reproducible.
  Tensor combined_x = {};
  EventHandle event = {};           ///< set with async_finish
  std::function<void()> hook = {};  ///< set with return_recv_hook
};

}  // namespace deep_ep
