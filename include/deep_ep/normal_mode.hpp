// Arguments and results of normal mode: dispatch and combine for training and prefill. Symbols as in buffer.hpp, and P
// nodes of R / P consecutive ranks.
//
// Unless a comment says otherwise, a tensor is contiguous (row-major) and is on the buffer's device.
#pragma once
// SPDX-License-Identifier: MIT

#include <cstdint>
#include <optional>
#include <vector>

#include "deep_ep/executor.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// Result of Buffer::get_dispatch_layout.
struct DispatchLayout {
  Tensor num_tokens_per_rank = {};    ///< [R] int32: tokens with at least one expert on that rank
  Tensor num_tokens_per_expert = {};  ///< [E] int32: (token, k) entries that name the expert
  Tensor num_tokens_per_node = {};    ///< [P] int32: tokens with at least one expert on that node; undefined for one
                                      ///< node, and for nodes of unequal numbers of ranks
  Tensor is_token_in_rank = {};       ///< [T, R] boolean
  EventHandle event = {};             ///< set with async_finish
};

/// Where the rows of a dispatch went. Any number of cached dispatches and combines may use it while the buffer lives.
/// Copies share the tensors. recv_src_idx may be in the symmetric heap, 4 bytes a row, as long as a copy lives.
struct DispatchHandle {
  /// [R, R / P] int32: [s][d] = rows that rank d of this node received from ranks 0..s (end row of source s).
  Tensor rank_prefix_matrix = {};
  Tensor destination_row = {};  ///< [T, R] int32: number of token t among this rank's tokens for rank d, -1 if not sent
                                ///< there. They follow each other in recv_x of d, behind those of earlier ranks
  Tensor recv_src_idx = {};     ///< [rows] int32: token index at its source, for each received row
  // Between nodes only: a token crosses the network once for each other node with one of its experts, to the sender's
  // rail, the rank with its index there.
  Tensor node_row = {};  ///< [T, P] int32: number of token t among this rank's tokens for node n, -1 if not sent there
  Tensor node_counts = {};  ///< [2, P] int32: this rank's tokens for node n; tokens of its rail in n for this node,
                            ///< except of its own
  Tensor relay_rows = {};   ///< [relayed, R / P] int32: for each token from its rails, by node and number: its number
                            ///< among the rail's tokens for each rank of this node, -1 if it has no row there
  std::int64_t num_recv_rows = 0;                                      ///< N, or num_worst_tokens
  std::int64_t num_tokens() const { return destination_row.size(0); }  ///< T
};

/// A dispatch. Without `handle` it exchanges counts. Equal on all ranks: the dtype and width of every tensor, E, K, and
/// the presence of optional tensors. Otherwise RankMismatch on every rank, before any row moves.
struct DispatchArguments {
  /// [T, H], any dtype with rows of a multiple of 16 bytes below 2 GiB; starts at a multiple of 16 bytes.
  ConstTensorView x = {};
  /// [T, S] float32 or int32, any strides, any S: the scales of 8-bit rows.
  std::optional<ConstTensorView> x_scales = {};

  /// Of an earlier dispatch of this buffer with as many tokens: rows go to its places, with any H and dtype. The call
  /// exchanges no counts, the host does not wait, and of the other members only `num_sms` counts. Used during the call.
  const DispatchHandle* handle = nullptr;

  // The layout, of get_dispatch_layout or computed in the same way.
  ConstTensorView is_token_in_rank = {};       ///< [T, R] boolean or uint8; decides where rows go
  ConstTensorView num_tokens_per_expert = {};  ///< [E] int32

  std::optional<ConstTensorView> topk_idx = {};  ///< [T, K] int32 or int64, K <= 32; what is no expert: no selection
  std::optional<ConstTensorView> topk_weights = {};  ///< [T, K] float32; not without topk_idx
  /// Counts in num_recv_tokens_per_expert are rounded up to multiples of this (0 stays 0). 1 to 2^20.
  int expert_alignment = 1;
  /// 0: exact sizes; the host waits. > 0: no host wait, and outputs have this many rows; rows from N on hold topk_idx
  /// -1 and are otherwise undefined. If more rows arrive, the others are lost, and the next call throws OutOfMemory.
  std::int64_t num_worst_tokens = 0;
  int num_sms = 0;  ///< SMs of this rank's call

  /// Sets the two tensors of the layout, which must stay alive until the call has ended.
  void use(const DispatchLayout& layout) {
    is_token_in_rank = layout.is_token_in_rank.view();
    num_tokens_per_expert = layout.num_tokens_per_expert.view();
  }
};

/// The result of Buffer::dispatch. Tensors are valid after the call, in stream order.
struct DispatchResult {
  Tensor recv_x = {};  ///< [rows, H], dtype of x: by source rank, then by token index at the source
  std::optional<Tensor> recv_x_scales = {};  ///< [rows, S], dtype of x_scales
  std::optional<Tensor> recv_topk_idx = {};  ///< [rows, K], dtype of topk_idx: index among this rank's experts, or -1
  std::optional<Tensor> recv_topk_weights = {};  ///< [rows, K] float32, with weights: 0 where the index is -1
  /// [E / R], rounded up; empty with num_worst_tokens, and, like the two above, with `handle`
  std::vector<int> num_recv_tokens_per_expert = {};
  DispatchHandle handle = {};  ///< for further dispatches and combine; with `handle` the same
  EventHandle event = {};      ///< set with async_finish
};

/// A combine. Equal on all ranks: H, and the presence of topk_weights; the biases may differ. The owners of the tokens
/// read the rows over NVLink if x and topk_weights are in the symmetric heap (received tensors, or of allocate_tensor).
/// Other rows are copied there first, or, where it has no room and in recordings, stored into a window of their owner.
/// The bits of the results do not depend on it.
struct CombineArguments {
  ConstTensorView x = {};                  ///< [rows of the handle, H] bfloat16, aligned to 16 bytes
  const DispatchHandle* handle = nullptr;  ///< of the dispatch whose rows come back; used during the call only
  std::optional<ConstTensorView> topk_weights = {};  ///< [rows of the handle, K] float32, K <= 32: summed slot by slot
  std::optional<ConstTensorView> bias_0 = {};        ///< [T, H] bfloat16, aligned to 16 bytes: added once
  std::optional<ConstTensorView> bias_1 = {};        ///< the same
  int num_sms = 0;                                   ///< SMs of this rank's call
};

/// The result of Buffer::combine, as DispatchResult.
struct CombineResult {
  /// [T, H] bfloat16: bias_0 + bias_1 + rows in rank order, added in fp32 and rounded once. The rows of another node
  /// count as one row: their sum in fp32, by rank, rounded to bfloat16.
  Tensor combined_x = {};
  std::optional<Tensor> combined_topk_weights = {};  ///< [T, K] float32; with topk_weights
  EventHandle event = {};                            ///< set with async_finish
};

}  // namespace deep_ep
