// Low-latency dispatch and combine, for decoding: few tokens, no host wait, CUDA graphs, receive hooks. They need a
// buffer with BufferOptions::low_latency.bytes.
//
// Symbols as in buffer.hpp, and L = E / R local experts, M = max_tokens, equal on all ranks; T <= M may differ.
//
//   dispatch:  token -> one row for each rank that owns one of its experts -> recv_x
//   (experts)  recv_x -> rows of the same shape
//   combine:   rows -> one partial sum for each rank (or, with hooks, as they are) -> the owner adds them -> combined_x
//
// A call has two parts, *send* and *receive*. One kernel runs both. With `return_recv_hook` the call enqueues the send
// part and result.hook() the receive part; no SM is busy between them. Outputs, counts and statistics are valid after
// the receive part, in stream order; inputs must stay alive and unchanged until then. Two calls of each kind (dispatch,
// combine) may wait for their hooks. Each rank may call its hooks late and in any order: a hook, and a call without
// one, first enqueues the earlier receive parts of its kind.
//
// Streams and order are those of all calls (buffer.hpp). A hook runs on the stream of its send part. Both parts of a
// call must be recorded into the same CUDA graph, or neither: otherwise the hook, or the next call without one, throws
// InvalidArgument. A call that throws after it has enqueued its send part has enqueued the receive part as well.
//
// Unless a comment says otherwise, a tensor is contiguous (row-major) and is on the buffer's device.
#pragma once
// SPDX-License-Identifier: MIT

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "deep_ep/arrivals.hpp"
#include "deep_ep/executor.hpp"
#include "deep_ep/low_latency_format.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// The facts about a dispatch that combine needs. Copies share the tensors.
struct LowLatencyHandle {
  /// [L, R * M] int32: token index at its source for each valid row.
  Tensor src_info = {};
  /// [L, R] int64: which rows of recv_x come from which source, as (first row << 32) | number of rows.
  Tensor layout_range = {};
  /// [2 + M + M * K, R] int32, whose elements are, one behind the other: the number of rows of each source, [R]; their
  /// token indices at the source, [R, M]; for each of them the rows of its K selections in recv_x (-1: on another
  /// rank), [R, M, K]; and the dispatch's number, the first element of the last row, by which combine detects handles
  /// of different dispatches. With weights there are M * K rows more behind that one: the weights, [R, M, K] float32.
  Tensor row_table = {};
  int num_tokens = 0;       ///< T, of this rank
  int max_tokens = 0;       ///< M
  int num_topk = 0;         ///< K
  int num_experts = 0;      ///< E
  std::int64_t hidden = 0;  ///< H
  /// The combines of this handle use the weights of the dispatch: see LowLatencyDispatchArguments::combine_weights.
  bool has_weights = false;
};

/// Equal on all ranks: all fields but T, the contents of tensors, the statistics, and num_sms.
struct LowLatencyDispatchArguments {
  /// [T, H] bfloat16, aligned to 16 bytes; H a multiple of 128 (of 512 with fp8_ue8m0).
  ConstTensorView x = {};
  /// [T, K] int32 or int64, K <= 32; what is no expert: none. A token may name an expert twice: two rows, if R * M hold
  /// them.
  ConstTensorView topk_idx = {};
  /// M, 1 or more; M * K is at most 65535. Buffer::low_latency_bytes_hint says how much memory it needs.
  int max_tokens = 0;
  int num_experts = 0;                              ///< E, a multiple of R, at most 65535
  LowLatencyFormat format = LowLatencyFormat::fp8;  ///< of the rows
  /// [1] float32, positive, with nvfp4: a factor of all scales, so a channel is about value * scale /
  /// x_global_scale. None: 1. 448 * 6 / the largest magnitude of x uses the whole range. It does not travel.
  std::optional<ConstTensorView> x_global_scale = {};
  /// [T, K] float32: the topk_weights of all combines of this dispatch, if they are known. They travel with the rows if
  /// all ranks reach each other by NVLink and the buffer has no masking. Then combine announces no selections, and with
  /// hooks it sends one sum for each rank and token, and waits for no late rank to send. Otherwise they have no effect.
  /// These combines must have the same topk_idx and these weights: with others this call and later ones may have wrong
  /// results, or end in TimeoutError. Given on all ranks or on none.
  std::optional<ConstTensorView> combine_weights = {};
  /// [L] int32: each entry grows by the number of rows that the expert received.
  std::optional<TensorView> cumulative_local_expert_recv_stats = {};
  /// [R] int64: each entry grows by the clock cycles of waiting for that source.
  std::optional<TensorView> wait_recv_cost_stats = {};
  /// [L, W] int64: words that tell another kernel, while the call still receives, which rows are complete; one for each
  /// arrival_rows rows: see deep_ep/arrivals.hpp. InvalidArgument for a buffer with masking.
  std::optional<TensorView> arrival_counters = {};
  /// A power of two below 2^20, with arrival_counters. 0: W is 1, and a word stands for all rows of its expert.
  int arrival_rows = 0;
  /// Only sends; the result's hook enqueues the receive part. Not with CallOptions::async_finish. InvalidArgument if
  /// two dispatches already wait for their hooks.
  bool return_recv_hook = false;
  /// With return_recv_hook: the owner of these tensors. The buffer keeps it until the hook, or a later call if the hook
  /// was dropped, has enqueued the receive part.
  std::shared_ptr<void> owner = {};
  int num_sms = 0;  ///< SMs of this rank's call, at least 2
};

/// The result of Buffer::low_latency_dispatch. With return_recv_hook the tensors are valid after the hook only.
struct LowLatencyDispatchResult {
  /// [L, R * M, H] bfloat16 or float8_e4m3; NVFP4: uint8 [L, R * M, H / 2], the first of two values in the lower half
  /// of a byte. Rows 0 .. recv_count[l] - 1 of each expert are valid, by source rank, then by token; others are
  /// undefined.
  Tensor recv_x = {};
  /// float32 [L, R * M, H / 128] or int32 [L, R * M, H / 512] for the rows of recv_x; the last two dimensions are
  /// column-major. NVFP4: uint8 [L, tiles, H / 64, 512] in the order of tensor cores: a tile is 128 rows of recv_x (the
  /// last may reach beyond them), and scale c of its row r is byte 16 * (r % 32) + 4 * (r / 32) + c % 4 of the 512
  /// bytes for c / 4.
  std::optional<Tensor> recv_x_scales = {};
  Tensor recv_count = {};        ///< [L] int32
  LowLatencyHandle handle = {};  ///< for combine
  EventHandle event = {};        ///< set with async_finish
  /// Set with return_recv_hook: enqueues the receive part; a second call before the buffer's end does nothing.
  std::function<void()> hook = {};
};

/// Single-batch overlap: a kernel of the program, on another stream, writes x while combine's send part runs, and
/// raises a signal for each block of rows. Combine acquires the signal before it reads the rows, and sends complete
/// rows first. A signal that is not raised by the deadline ends the call: TimeoutError names it.
struct LowLatencyOverlap {
  /// [n] int32, n >= L * W, where W is R * M / signal_rows, rounded up (1 for 0). Element l * W + b belongs to the rows
  /// of local expert l from b * signal_rows on. The kernel raises it to `expected` or more, with release at GPU scope.
  /// The program sets it to zero before; combine does not reset it, and does not read elements without valid rows.
  /// None: all rows are complete.
  std::optional<ConstTensorView> signals = {};
  int signal_rows = 0;  ///< 0: all rows of an expert
  int expected = 1;     ///< 1 or more
  int num_sms = 0;      ///< the most SMs of the send part, as the other kernel needs some; 0: those of the call
};

/// Equal on all ranks: H, and the dispatch of the handle. Otherwise RankMismatch.
struct LowLatencyCombineArguments {
  /// The experts' output: [L, R * M, H] bfloat16, aligned to 16 bytes, rows in the places of recv_x. Combine reads only
  /// valid rows. H may differ from the dispatch's.
  ConstTensorView x = {};
  /// [T, K] int32 or int64 as dispatched; a selection that is no expert any more adds nothing. RankMismatch if one
  /// names another expert (TimeoutError, which names its rank, if that rank got no row of the token).
  ConstTensorView topk_idx = {};
  ConstTensorView topk_weights = {};  ///< [T, K] float32: factors of the rows, those of the dispatch if it had any
  const LowLatencyHandle* handle = nullptr;  ///< of the dispatch, for any number of combines; read during the call only
  /// [T, H] bfloat16, aligned to 16 bytes: the result's memory. None: new memory.
  std::optional<TensorView> out = {};
  std::optional<TensorView> wait_recv_cost_stats = {};  ///< [R] int64, as for dispatch
  bool return_recv_hook = false;     ///< as for dispatch; combines are counted separately. Equal on all ranks of a node
  std::shared_ptr<void> owner = {};  ///< as for dispatch
  int num_sms = 0;                   ///< SMs of this rank's call
  /// With return_recv_hook. Each rank decides for itself; the bits of the results are the same. Unsupported with ranks
  /// that RDMA reaches, with masking, with weights in the handle, and if low_latency.bytes has no room for a row of
  /// each selection.
  std::optional<LowLatencyOverlap> overlap = {};
};

/// The result of Buffer::low_latency_combine, as LowLatencyDispatchResult.
struct LowLatencyCombineResult {
  /// [T, H] bfloat16; with `out`, a tensor over that memory, which stays the caller's. All is added in fp32: the rows
  /// of a rank times their weights from zero on, in the order of selections, by fused multiply-adds; the ranks of a
  /// node from zero on, ascending; then the nodes, ascending (all ranks count as one node where nodes
  /// are not of equally many consecutive ranks). A sum of several rows of a rank, or, if there are several nodes, of a
  /// node, keeps the bits that LowLatencyOptions::sums says, and the last one is rounded. The same inputs
  /// give the same bits, with and without hooks and combine_weights, over every transport.
  Tensor combined_x = {};
  EventHandle event = {};           ///< set with async_finish
  std::function<void()> hook = {};  ///< set with return_recv_hook
};

}  // namespace deep_ep
