// Dispatch and combine of DeepEP's second interface (ElasticBuffer). Symbols as in buffer.hpp; besides, M is the most
// tokens of any rank, N received rows (the first ones are valid if the host did not wait), X rows of the expanded
// layout.
//
// The expanded layout has a row for each selection of a local expert, by expert, then by received row, then by
// selection. Each expert's rows begin at a multiple of the alignment; the rows between are a gap.
//
// The metadata of received rows, [N, K + 2] int32: column 0 is source rank * M + token; column 1 is source rank * K +
// the last selection of a local expert; then, for each selection, its row in the expanded layout, -1 for none.
//
// Unless a comment says otherwise, a tensor is contiguous (row-major) and is on the buffer's device. Kernels read all
// of them when they run.
#pragma once
// SPDX-License-Identifier: MIT

#include <cstdint>
#include <optional>
#include <vector>

#include "deep_ep/executor.hpp"
#include "deep_ep/normal_mode.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// For later calls. Rows after the last valid one are undefined.
struct ElasticDispatchHandle {
  Tensor source_ends = {};  ///< [R] int32: ends of the sources' rows, at most N; the last one: valid rows
  /// [E / R] int32: with `expand` where each expert's rows end, without their gap; otherwise sums of the counts, each
  /// rounded up to the alignment.
  Tensor expert_ends = {};
  Tensor expert_counts = {};   ///< [E / R] int32: selections of each expert
  Tensor metadata = {};        ///< [N, K + 2] int32; rows of the expanded layout are -1 without `expand`
  Tensor local_topk_idx = {};  ///< [N, K] int32: index among this rank's experts, or -1
  /// [T, K] int32: in all K columns the row that this rank received of its own token, or -1; between nodes -1.
  Tensor own_rows = {};
  DispatchHandle route = {};      ///< between nodes: where each token's row went
  Tensor topk_idx = {};           ///< with `copy_selections`
  std::int64_t num_expanded = 0;  ///< X
};

/// A dispatch. Equal on all ranks: dtype and width of every tensor, E, M, which of the optional tensors are given, and
/// `num_sms`. Otherwise RankMismatch.
struct ElasticDispatchArguments {
  ConstTensorView x = {};                        ///< [T, H], as DispatchArguments::x
  std::optional<ConstTensorView> x_scales = {};  ///< [T, S], as DispatchArguments::x_scales
  /// Of an earlier dispatch of as many tokens, on all ranks or on none: rows go where those went, with any H and dtype,
  /// and `expand`, topk_idx and num_experts as then. The host does not wait. Of the other members only topk_weights,
  /// max_tokens, expert_alignment, expand, zero_padding, column_major_scales and num_sms count. Used during the call.
  /// The call reads route, metadata (which may have any stride between rows), source_ends, local_topk_idx, and, with
  /// `zero_padding`, expert_ends.
  const ElasticDispatchHandle* handle = nullptr;
  ConstTensorView topk_idx = {};  ///< [T, K] int32 or int64; a number that is no expert selects nothing
  std::optional<ConstTensorView> topk_weights = {};  ///< [T, K] float32
  std::optional<TensorView> stats = {};              ///< [E / R] int32: the call adds the counts
  int num_experts = 0;                               ///< E
  int max_tokens = 0;                                ///< M
  int expert_alignment = 1;                          ///< as DispatchArguments::expert_alignment
  /// True: the host waits, and results have exact sizes. False: N is R * M, X is the most that N rows can need, and
  /// rows after the last valid one are undefined; their indices are -1.
  bool exact = true;
  bool expand = false;               ///< results are of the expanded layout
  bool zero_padding = false;         ///< with `expand`: its gaps are zero
  bool column_major_scales = false;  ///< received scales have strides (1, rows rounded up to 4)
  bool copy_selections = false;      ///< the handle has a copy of topk_idx
  int num_sms = 0;                   ///< SMs that send rows; the call takes further SMs to number them
};

/// The result of a dispatch. Tensors are valid after the call, in stream order.
struct ElasticDispatchResult {
  Tensor recv_x = {};                                ///< [N, H] by source rank, then by token; expanded: [X, H]
  std::optional<Tensor> recv_x_scales = {};          ///< [N, S] or [X, S], if there are scales
  std::optional<Tensor> recv_topk_idx = {};          ///< not expanded: [N, K], index among this rank's experts, or -1
  std::optional<Tensor> recv_topk_weights = {};      ///< [N, K], 0 where the index is -1; expanded: [X]
  std::vector<int> num_recv_tokens_per_expert = {};  ///< [E / R], rounded up; empty without `exact` and with a handle
  ElasticDispatchHandle handle = {};                 ///< for later dispatches and combine; empty with a handle
  EventHandle event = {};                            ///< set with async_finish
};

/// A combine. Equal on all ranks: H, K, E, M, `each_selection`, and whether there are weights.
struct ElasticCombineArguments {
  /// [any number, H] bfloat16, aligned to 16 bytes, in any memory of the device: each row for another rank's token
  /// travels once.
  ConstTensorView x = {};
  ConstTensorView metadata = {};     ///< [N, K + 2] int32, of the handle; stride 1 within a row
  ConstTensorView source_ends = {};  ///< [R] int32, of the handle
  ConstTensorView topk_idx = {};     ///< [T, K] int32 or int64, as dispatched
  ConstTensorView own_rows = {};     ///< [T, K] int32, of the handle
  int num_experts = 0;               ///< E
  int max_tokens = 0;                ///< M
  /// True: the metadata names rows of x; a named row beyond the end of x counts as none. False: x has N rows.
  bool expanded = false;
  /// With `expanded`: the token's rank adds the rows of all selections, and rounds once.
  bool each_selection = false;
  /// [N, K] float32, or, expanded, [rows of x]; not with `each_selection`.
  std::optional<ConstTensorView> topk_weights = {};
  std::optional<ConstTensorView> bias_0 = {};  ///< [T, H] bfloat16, aligned to 16 bytes: added first
  std::optional<ConstTensorView> bias_1 = {};  ///< the same: added second
  int num_sms = 0;                             ///< SMs of this rank's call
};

/// The rows that a combine has brought whose sums are made later. Tensors hold their contents behind the call.
struct ElasticReturn {
  ElasticCombineArguments arguments = {};  ///< of the combine
  Tensor rows = {};                        ///< [most that may come, H] bfloat16
  Tensor beside = {};   ///< [as many, 1 or 1 + K] int32: the selection that a row belongs to, then weights
  Tensor ends = {};     ///< [R, R / P] int32: as DispatchHandle::rank_prefix_matrix, of these rows
  EventHandle event{};  ///< set with async_finish
};

}  // namespace deep_ep
