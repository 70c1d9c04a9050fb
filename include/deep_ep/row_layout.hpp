// Layouts of rows that Buffer::dispatch received, as DeepEP's V2 interface has them: the source of every row
// (metadata), the expanded layout, and the way of rows back to their tokens. These functions use the memory of one
// device. They talk to no other rank, and the host does not wait, so calls can be recorded.
//
// Symbols: R ranks, r this rank; E experts, L = E / R on each rank; T tokens of this rank, K selections of each; M the
// most tokens of any rank; N received rows (only the first ones are valid if the dispatch had no host wait); X rows of
// the expanded layout. The expanded layout has a row for each selection of a local expert: by expert, then by received
// row, then by selection. Each expert's rows begin at a multiple of A, the alignment; rows between two experts are a
// gap.
//
// The metadata of received rows, [N, K + 2] int32: column 0 is source rank * M + token; column 1 is source rank * K +
// the last selection of a local expert; then, for each selection, its row in the expanded layout, -1 for none.
//
// Tensors are on the executor's device (`executor` is of make_cuda_executor or make_host_executor), and contiguous
// unless a comment says otherwise. Kernels are enqueued on `stream`; tensors must stay alive and unchanged until they
// have ended. Errors are InvalidArgument, which names the argument.
#pragma once
// SPDX-License-Identifier: MIT

#include <memory>
#include <optional>

#include "deep_ep/executor.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// The arguments of number_rows: facts about the rows of a dispatch, and the results.
struct RowNumbering {
  ConstTensorView recv_topk_idx = {};       ///< [N, K] int32 or int64: index of a local expert, negative for none
  ConstTensorView recv_src_idx = {};        ///< [N] int32, of the DispatchHandle
  ConstTensorView rank_prefix_matrix = {};  ///< [R, R] int32, of the DispatchHandle
  ConstTensorView destination_row = {};     ///< [T, R] int32, of the DispatchHandle
  ConstTensorView topk_idx = {};            ///< [T, K] int32 or int64, as dispatched
  int rank = 0;                             ///< r
  int num_local_experts = 0;                ///< L
  int max_tokens = 0;                       ///< M
  int alignment = 1;                        ///< A, 1 to 2^20
  bool expand = false;                      ///< number the rows of the expanded layout; otherwise the metadata says -1

  // Results.
  TensorView source_ends = {};           ///< [R] int32: the end of each source's rows, at most N; the last: valid rows
  TensorView expert_ends = {};           ///< [L] int32: with `expand` where each expert's rows end, without their gap;
                                         ///< otherwise sums of the counts, each rounded up to A
  TensorView expert_counts = {};         ///< [L] int32: selections of each expert
  std::optional<TensorView> stats = {};  ///< [L] int32: the call adds the counts
  TensorView metadata = {};              ///< [N, K + 2] int32; -1 in rows that are not valid
  TensorView local{};                    ///< [N, K] int32: recv_topk_idx again; -1 in rows that are not valid
  TensorView rows_at_owners = {};  ///< [T, K] int32: the row of each selection's token on the expert's rank, or -1
  std::optional<TensorView> selected = {};  ///< [T, K] of topk_idx's dtype: a copy of it
  TensorView scratch = {};                  ///< [number_rows_scratch()] int32
};

/// The int32 elements of RowNumbering::scratch, with `num_local_experts` experts (L).
std::int64_t number_rows_scratch(const std::shared_ptr<Executor>& executor, int num_local_experts);

/// Numbers the rows of a dispatch: writes the results that `call` names. One launch, two for many selections.
void number_rows(const std::shared_ptr<Executor>& executor, const RowNumbering& call, StreamHandle stream);

/// The arguments of spread_rows: received rows with their scales, weights and selections, and the results. Rows of the
/// results that no argument names stay as they are.
struct RowSpreading {
  ConstTensorView source_ends = {};  ///< [R] int32, of number_rows
  /// [N, K + 2] int32: rows go into the expanded layout. The tensors below may have more than N rows.
  std::optional<ConstTensorView> metadata = {};
  /// [N, K] int32, of number_rows. Without metadata it is needed, and each row keeps its place.
  std::optional<ConstTensorView> local = {};

  std::optional<ConstTensorView> rows = {};        ///< [N, H] of any dtype, rows of a multiple of 16 bytes
  std::optional<TensorView> spread_rows = {};      ///< [X or N, H]
  std::optional<ConstTensorView> scales = {};      ///< [N, S] of 4 bytes, stride 1 within a row
  std::optional<TensorView> spread_scales = {};    ///< [X or N, S] of 4 bytes, any strides
  std::optional<ConstTensorView> weights = {};     ///< [N, K] of 4 bytes, stride 1 within a row
  std::optional<TensorView> spread_weights = {};   ///< [X] with metadata, else [N, K] with 0 where `local` is negative
  std::optional<TensorView> spread_topk_idx = {};  ///< [N, K] int32 or int64: `local`; not with metadata

  /// [L] int32, of number_rows, with metadata: the call fills gaps with zeros.
  std::optional<ConstTensorView> expert_counts = {};
  int alignment = 1;  ///< of these gaps
};

/// Brings rows, scales, weights and selections into the layout that `call` names. One launch.
void spread_rows(const std::shared_ptr<Executor>& executor, const RowSpreading& call, StreamHandle stream);

/// For each valid row i, sums[i] = the rows that the metadata of row i names, added in float32 by ascending selection
/// and rounded once. One launch.
///
/// \param rows         [any number, H] bfloat16; a named row beyond the end counts as none
/// \param metadata     [N, K + 2] int32
/// \param source_ends  [R] int32, of number_rows
/// \param sums         [N, H] bfloat16
void sum_expanded_rows(const std::shared_ptr<Executor>& executor, const ConstTensorView& rows,
                       const ConstTensorView& metadata, const ConstTensorView& source_ends, const TensorView& sums,
                       StreamHandle stream);

/// The arguments of address_rows. Its results are arguments of a Buffer::dispatch that takes rows back to their tokens,
/// with `beside` as the scales.
struct RowAddressing {
  ConstTensorView metadata = {};     ///< [N, K + 2] int32
  ConstTensorView source_ends = {};  ///< [R] int32, of number_rows
  int max_tokens = 0;                ///< M
  /// False: a row for each received row goes back, and S = N. True: each of the S rows that the metadata names goes
  /// back; is_token_in_rank must be zero before.
  bool each_selection = false;
  /// Without `each_selection`: [N, K] float32, or [any] with a value for each row of the expanded layout.
  std::optional<ConstTensorView> weights = {};

  TensorView beside = {};                  ///< [S, 1] int32, or [S, 1 + K] with weights: for sum_returned_rows
  TensorView is_token_in_rank = {};        ///< [S, R] boolean
  TensorView num_tokens_per_rank = {};     ///< [R] int32
  std::optional<TensorView> scratch = {};  ///< [address_rows_scratch()] int32; not needed if that is 0
};

/// The int32 elements of RowAddressing::scratch, for metadata of `rows` rows (N) and `num_ranks` ranks (R); often 0.
std::int64_t address_rows_scratch(const std::shared_ptr<Executor>& executor, std::int64_t rows, int num_ranks);

/// Writes the results that `call` names. One launch, or two with scratch.
void address_rows(const std::shared_ptr<Executor>& executor, const RowAddressing& call, StreamHandle stream);

/// The arguments of sum_returned_rows, which adds up for each token in float32, and rounds once: biases, then either
/// the ranks' rows by their last selection, or, with `each_selection`, the selections' rows.
struct RowReturn {
  ConstTensorView rows = {};                   ///< [any number, H] bfloat16, received by that dispatch
  ConstTensorView beside = {};                 ///< [as many, 1 or 1 + K] int32, its scales; stride 1 within a row
  ConstTensorView rank_prefix_matrix = {};     ///< [R, R] int32, of that dispatch
  ConstTensorView topk_idx = {};               ///< [T, K] int32 or int64
  int rank = 0;                                ///< r
  int num_local_experts = 0;                   ///< L
  bool each_selection = false;                 ///< as RowAddressing::each_selection was
  std::optional<ConstTensorView> bias_0 = {};  ///< [T, H] bfloat16: added first
  std::optional<ConstTensorView> bias_1 = {};  ///< [T, H] bfloat16: added second

  TensorView sums = {};                    ///< [T, H] bfloat16
  std::optional<TensorView> weights = {};  ///< [T, K] float32: of each selection, from its rank; 0 for none
  TensorView scratch = {};                 ///< [T, K] int32
};

/// Adds up the returned rows: writes the results that `call` names. Two launches.
void sum_returned_rows(const std::shared_ptr<Executor>& executor, const RowReturn& call, StreamHandle stream);

}  // namespace deep_ep
