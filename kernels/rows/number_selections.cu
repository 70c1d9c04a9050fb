// An index of received rows: where each came from, how many selections each expert has, and the row of each selection
// in the expanded layout: by expert, then by received row, then by selection.
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/rows/numbering.hpp"

namespace deep_ep::device {

/// Received rows, each of which has a selection of this rank.
struct ReceivedTokens {
  static constexpr bool kOfAllRanks = false;

  const NumberRowsParams& params;

  DEEP_EP_DEVICE void find(Selection& selection, bool& /*good*/) const {
    const std::int64_t at = std::int64_t{selection.position} * params.numbers.metadata.num_topk + selection.k;
    selection.token = params.source[selection.position];
    selection.local = expert_of(params.recv_topk_idx.load_cached(at), params.numbers.num_experts);
  }
  DEEP_EP_DEVICE void tell_host(const SelectionNumberer<ReceivedTokens>& /*numberer*/) const {}
};

DEEP_EP_DEVICE void number_selections_body(const NumberRowsParams& params, std::byte* memory) {
  // Nothing is known of the rows of a call that has failed.
  if (aborted(params.wait)) return;
  const NumberingParams& numbers = params.numbers;
  const NumberingShared shared{Carver(memory), numbers, ReceivedTokens::kOfAllRanks};
  block::each(numbers.num_ranks, [&](int source) {
    // Of rows that had no room nothing is known but their number, and nothing of theirs may be looked for.
    const std::int64_t end = load_weak(params.ends + source * params.ends_stride);
    shared.source_ends[source] =
        static_cast<std::int32_t>(end < numbers.metadata.num_rows ? end : numbers.metadata.num_rows);
  });
  const ReceivedTokens tokens{params};
  // All blocks run at once, and none begins after another kernel has failed.
  SelectionNumberer<ReceivedTokens>{tokens, numbers, shared, params.wait}.number(true);
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(number_selections, deep_ep::device::number_selections_body)
