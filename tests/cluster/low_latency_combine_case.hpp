// A low-latency combine after a dispatch, for all ranks: what the experts made, what the owners select now, and what
// the oracle says must come out.
#pragma once

#include <vector>

#include "tests/cluster/low_latency_case.hpp"

namespace deep_ep::test {

struct LowLatencyCombineCase {
  LowLatencyCase before;                               ///< the dispatch, in bfloat16
  std::int64_t hidden;                                 ///< of what the experts made
  std::vector<oracle::LowLatencyCombineInput> inputs;  ///< one per rank; rows that no token fills are NaN
  oracle::LowLatencyCombineOptions options{};

  /// The sums of the oracle, which no transport changes. ranks_per_node 0: as the options say.
  std::vector<oracle::Combined> expected(int ranks_per_node = 0) const;
};

/// `hidden` 0: as dispatched.
LowLatencyCombineCase make_low_latency_combine_case(const LowLatencyCaseShape& shape, std::int64_t hidden = 0);
/// After a dispatch of bfloat16 rows.
LowLatencyCombineCase make_combine_case_after(LowLatencyCase before, std::int64_t hidden = 0);

/// Dispatches; `weights`: those of the combine, too.
LowLatencyHandle dispatch_low_latency(Rank& rank, Buffer& buffer, const LowLatencyCombineCase& one,
                                      bool weights = false);
/// Uploads what the rank hands to combine.
LowLatencyCombineArguments upload_combine(Rank& rank, const LowLatencyCombineCase& one, const LowLatencyHandle& handle);
/// The arguments of a combine of rows of any contents, all with one weight, for these selections.
LowLatencyCombineArguments combine_anything(Rank& rank, const LowLatencyHandle& handle, const ConstTensorView& topk_idx,
                                            float weight);
/// Other selections than those of the dispatch: all weights others, and about so many gone.
void change_selections(LowLatencyCombineCase& one, double gone, std::uint64_t seed);
/// Compares bit by bit, and with the exact sums.
void check_low_latency_combine(Rank& rank, const LowLatencyCombineCase& one,
                               const std::vector<oracle::Combined>& expected, const TensorView& combined);

/// A dispatch and its combine, checked.
void dispatch_and_combine(Rank& rank, Buffer& buffer, const LowLatencyCombineCase& one,
                          const std::vector<oracle::Combined>& expected);

}  // namespace deep_ep::test
