// Parts that dispatch and combine of the second interface share, inside a node and between nodes.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "csrc/buffer/normal_mode.hpp"
#include "deep_ep/elastic.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep {

// Throw InvalidArgument.
void check_elastic_dispatch(const ElasticDispatchArguments& arguments, const Runtime& runtime);
void check_elastic_combine(const ElasticCombineArguments& arguments, const Runtime& runtime);

/// Of [N, K + 2] int32, columns of a row next to each other; `source_ends` says how many rows are valid.
RowMetadata row_metadata(const ConstTensorView& metadata, const ConstTensorView& source_ends, const Device& device);

/// X: by the counts of a dispatch, which it has with exact sizes only.
std::int64_t expanded_rows(const ElasticDispatchArguments& arguments, int num_ranks, const std::vector<int>& counts);

/// Tables for `rows` rows, and `scratch_words` int32 that only the call uses, in one piece of memory.
struct ElasticTables {
  ElasticDispatchHandle handle;
  std::int32_t* scratch;
};
ElasticTables make_elastic_tables(const ElasticDispatchArguments& arguments, int num_ranks, std::int64_t rows,
                                  bool sent_to, std::int64_t scratch_words, const CallScope& scope);

/// Tensors for `rows` received rows, handed out to the caller.
ElasticDispatchResult make_elastic_results(const ElasticDispatchArguments& arguments,
                                           const ElasticDispatchHandle& handle, std::int64_t rows,
                                           const CallScope& scope);

/// Rows as they came. Of what lies beside them, so many words for each: scales, then weights.
struct RowsThatCame {
  const std::byte* rows;
  std::uint32_t row_bytes;
  const std::uint32_t *scales, *weights;
  std::int64_t scale_stride, weight_stride;
};
/// Arguments of the kernel that takes them to the results.
SpreadRowsParams spreading_params(const RowsThatCame& came, const ElasticDispatchResult& results,
                                  const ElasticDispatchArguments& arguments, const ElasticDispatchHandle& handle,
                                  const std::uint64_t* abort);
/// Those of a handle, as kernels are told of it.
RowTables tables_of(const ElasticDispatchHandle& handle, const ElasticDispatchArguments& arguments);

// Launches of the kernels of rows, which work within this device's memory.

/// How rows are numbered, and how many int32 blocks need to tell each other what they count: 0 for one block.
struct NumberingPlan {
  static constexpr int kWords = 4;  ///< of a CountExchange beside the counts

  LaunchShape shape;
  std::int64_t scratch_words;
};
NumberingPlan plan_numbering(const NumberRowsParams& params, const LaunchPolicy& policy, bool on_gpu);
void number_rows(Backend& executor, NumberRowsParams& params, const NumberingPlan& plan, std::int32_t* scratch,
                 StreamHandle stream);
LaunchShape plan_spreading(SpreadRowsParams& params, const LaunchPolicy& policy);
/// Sets what the kernel expects to be zero.
void address_rows(Backend& executor, const AddressRowsParams& params, StreamHandle stream);
/// Before sum_rows where rows came back.
void find_returned_rows(const Backend& executor, const SumRowsParams& params, StreamHandle stream);
void sum_rows(const Backend& executor, const SumRowsParams& params, StreamHandle stream);

// Combine by a dispatch of the rows back to their tokens, and sums of what came: between nodes, and where biases are
// read later than the call.

CombineResult combine_by_dispatch(const ElasticCombineArguments& arguments, NormalMode& mode, const CallOptions& call);
ElasticReturn begin_combine(const ElasticCombineArguments& arguments, NormalMode& mode, const CallOptions& call);
CombineResult end_combine(const ElasticReturn& back, const ElasticCombineArguments& arguments, Runtime& runtime,
                          const CallOptions& call);

}  // namespace deep_ep
