// The combine of DeepEP's second interface (ElasticBuffer), among ranks of one node. Symbols as in buffer.hpp and
// row_layout.hpp: M most tokens of a rank, N received rows with their metadata.
//
// Unless said otherwise a tensor is contiguous (row-major) and lies on the buffer's device. All of them are read on the
// device, when the call's kernel runs.
#pragma once

#include <optional>

#include "deep_ep/config.hpp"
#include "deep_ep/normal_mode.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// Equal on all ranks: H, K, E, M, `each_selection`, and whether there are weights.
struct ElasticCombineArguments {
  /// [any number, H] bfloat16, from a multiple of 16 bytes on. It may lie anywhere: each row for another rank's token
  /// travels once.
  ConstTensorView x = {};
  ConstTensorView metadata = {};        ///< [N, K + 2] int32, of number_rows; the columns of a row next to each other
  ConstTensorView source_ends = {};     ///< [R] int32, of number_rows
  ConstTensorView topk_idx = {};        ///< [T, K] int32 or int64, as dispatched
  ConstTensorView rows_at_owners = {};  ///< [T, K] int32, of number_rows
  int num_experts = 0;                  ///< E
  int max_tokens = 0;                   ///< M
  /// The rows of x are those that the metadata names; one that x does not have counts as none. Otherwise x has N rows.
  bool expanded = false;
  /// With `expanded`: the rows of all selections are added up by the token's rank, and rounded once.
  bool each_selection = false;
  /// [N, K] float32, or, expanded, [rows of x]; not with `each_selection`.
  std::optional<ConstTensorView> topk_weights = {};
  std::optional<ConstTensorView> bias_0 = {};  ///< [T, H] bfloat16, from a multiple of 16 bytes on: added first
  std::optional<ConstTensorView> bias_1 = {};  ///< the same: added second
  Config config = {};                          ///< SMs and warps of this rank's call
};

}  // namespace deep_ep
