// Runs the steps of a case on a buffer, as one of its ranks, and checks every output against the oracle.
#pragma once

#include <optional>

#include "tests/cluster/case.hpp"
#include "tests/cluster/cluster.hpp"

namespace deep_ep::test {

/// The inputs of one rank in device memory.
struct Inputs {
  TensorView topk_idx;  ///< always there: the layout needs it
  DispatchArguments dispatch;
};

/// Uploads; the layout tensors are the oracle's, so that dispatch can be tested without get_dispatch_layout.
Inputs upload_inputs(Rank& rank, const Case& one);
/// Those of a dispatch with the layout of an earlier one.
inline DispatchArguments cached_dispatch(const Inputs& inputs, const DispatchHandle& handle) {
  DispatchArguments arguments;
  arguments.x = inputs.dispatch.x;
  arguments.x_scales = inputs.dispatch.x_scales;
  arguments.handle = &handle;
  return arguments;
}

void check_layout(Rank& rank, const Case& one, const DispatchLayout& layout);
/// What it says of nodes, of which there are several.
void check_node_counts(Rank& rank, const Case& one, int nodes, const DispatchLayout& layout);

/// The handle's numbers for rank `rank`, where the oracle names rows: those of its tokens among the rows for each rank,
/// and those at which the rows of each source end on the ranks of its node.
std::vector<std::int32_t> numbers_of_tokens(const Case& one, int rank);
std::vector<std::int32_t> ends_on_node(const Case& one, int rank);

struct DispatchExpectations {
  bool cached = false;
  std::int64_t num_worst_tokens = 0;
};
void check_dispatch(Rank& rank, const Case& one, const DispatchResult& result, DispatchExpectations expected = {});

/// What combine reads: the expert outputs of this rank, in the heap or in ordinary memory, and what else it may get.
struct Returned {
  std::vector<Tensor> in_heap;  ///< keeps the memory
  CombineArguments combine;
};
/// `rows` may exceed the rows really received (worst-case handles); the tail is filled with NaN bits.
Returned upload_returned(Rank& rank, Buffer& buffer, const Case& one, const DispatchHandle& handle, bool heap);
void check_combine(Rank& rank, const Case& one, const CombineResult& result);

/// Takes all that is left of the heap, so that dispatch must receive through its window.
std::vector<Tensor> take_whole_heap(Rank& rank, Buffer& buffer);

struct RoundOptions {
  int num_sms = 0;
  std::int64_t num_worst_tokens = 0;
  bool use_layout_call = true;  ///< get_dispatch_layout, checked; otherwise the oracle's tensors
  bool returned_in_heap = true;
};

/// Layout, dispatch and combine, all checked.
void run_round(Rank& rank, Buffer& buffer, const Case& one, const RoundOptions& options = {});

}  // namespace deep_ep::test
