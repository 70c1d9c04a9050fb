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
/// `sent`: the same as a dispatch of normal mode, without a layout or handle.
void check_elastic_dispatch(const ElasticDispatchArguments& arguments, const DispatchArguments& sent,
                            const Runtime& runtime);
void check_elastic_combine(const ElasticCombineArguments& arguments, const Runtime& runtime);

/// Of [N, K + 2] int32, columns of a row next to each other; `source_ends` says how many rows are valid.
RowMetadata row_metadata(const ConstTensorView& metadata, const ConstTensorView& source_ends, const Device& device);

/// X: by the counts of a dispatch, which it has with exact sizes only.
std::int64_t expanded_rows(const ElasticDispatchArguments& arguments, int num_ranks, const std::vector<int>& counts);

/// Lays the window, whose sizes of a token are set, out from offset `at` in the heap's window to its end: `tokens` is
/// how many fit, at most all. The same on all ranks. Returns the bytes of a token.
std::size_t fit_window(TokenWindow& window, std::size_t at, const Runtime& runtime);
/// Of a fresh dispatch, before there are tables.
NumberingParams numbering_params(const ElasticDispatchArguments& arguments, const Runtime& runtime);
/// Chooses the blocks that number so many selections, at most so many, and lets as many of the `params.warps` warps of
/// each count as have `room` for their counters; one of each at least. Returns the bytes of a block. InvalidArgument
/// where that is more than the room.
std::size_t fit_numbering(NumberingParams& params, bool of_all_ranks, std::int64_t selections, int most_blocks,
                          std::size_t room);
/// Tables for `rows` rows, in one piece of memory with what blocks tell each other, and `numbers` told of them.
/// `in_node`: selections of all ranks are numbered.
ElasticDispatchHandle make_elastic_tables(const ElasticDispatchArguments& arguments, std::int64_t rows, bool in_node,
                                          NumberingParams& numbers, KernelState& state, const CallScope& scope);

/// Makes the tensors for received rows, handed out to the caller.
void make_elastic_results(ElasticDispatchResult& results, const ElasticDispatchArguments& arguments,
                          const ElasticDispatchHandle& handle, const CallScope& scope);

/// Completes the arguments of the kernel that takes rows to the results: `params` says where they, and words of scales
/// and weights beside them, lie.
void spread_to(const ElasticDispatchResult& results, const ElasticDispatchArguments& arguments,
               const ElasticDispatchHandle& handle, SpreadRowsParams& params);

LaunchShape plan_spreading(SpreadRowsParams& params, const LaunchPolicy& policy);

/// Of a combine by a dispatch of the rows back to their tokens: sums of what came.
CombineResult sum_returned(const ElasticReturn& back, Runtime& runtime, const CallScope& scope);

}  // namespace deep_ep
