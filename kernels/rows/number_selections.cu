// An index of received rows: where each came from, how many selections each expert has, and the row of each selection
// in the expanded layout: by expert, then by received row, then by selection.
//
// A column of counters (numbering.hpp) is an expert's.
#include "kernels/common/wait.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/rows/numbering.hpp"

namespace deep_ep::device {

DEEP_EP_DEVICE std::int64_t valid_rows(const NumberRowsParams& params) {
  const std::int64_t valid = load_weak(params.ends + (params.num_ranks - 1) * params.ends_stride);
  return valid < params.metadata.num_rows ? valid : params.metadata.num_rows;
}

/// By one block: what is said of each source and each expert.
DEEP_EP_DEVICE void write_totals(const NumberRowsParams& params, const NumberingShared& shared) {
  for (int rank = thread_index(); rank < params.num_ranks; rank += block_threads()) {
    // Of rows that had no room nothing is known but their number, and nothing of theirs may be looked for.
    const std::int64_t end = shared.source_ends[rank];
    params.source_ends[rank] =
        static_cast<std::int32_t>(end < params.metadata.num_rows ? end : params.metadata.num_rows);
  }
  for (int expert = thread_index(); expert < params.num_experts; expert += block_threads()) {
    write_expert(params, expert, shared.totals[expert], shared.starts[expert], params.alignment);
  }
}

/// By a whole warp: numbers the selections of its share.
DEEP_EP_DEVICE void number_share(const NumberRowsParams& params, const SelectionNumbers& numbers,
                                 const Share<std::int64_t>& share) {
  const int num_topk = params.metadata.num_topk;
  for (std::int64_t first = share.begin; first < share.end; first += kWarpSize) {
    const std::int64_t at = first + lane_index();
    const bool there = at < share.end;
    const int expert = there ? expert_of(params.recv_topk_idx.load_cached(at), params.num_experts) : -1;
    std::int32_t slot = -1;
    if (params.expand) slot = numbers.take(expert, expert >= 0 ? numbers.shared.starts[expert] : 0, expert >= 0);
    if (!there) continue;
    const std::int64_t row = at / num_topk;
    params.metadata.slots(row)[at - row * num_topk] = slot;
    params.local[at] = expert;
  }
}

/// By a thread: where a valid row came from.
DEEP_EP_DEVICE void write_source(const NumberRowsParams& params, const NumberingShared& shared, std::int64_t row) {
  const int num_topk = params.metadata.num_topk;
  int source = 0;
  for (int behind = params.num_ranks; source < behind;) {  // the first one whose rows end behind this one
    const int middle = (source + behind) / 2;
    if (shared.source_ends[middle] > row) {
      behind = middle;
    } else {
      source = middle + 1;
    }
  }
  int last = 0;
  for (int k = 0; k < num_topk; ++k) {
    if (expert_of(params.recv_topk_idx.load_cached(row * num_topk + k), params.num_experts) >= 0) last = k;
  }
  params.metadata.row(row)[0] = source * params.max_tokens + params.source[row];
  params.metadata.row(row)[1] = source * num_topk + last;
}

/// By all threads of the grid: the rows of this rank's own tokens at the owners of their experts.
DEEP_EP_DEVICE void write_rows_at_owners(const NumberRowsParams& params) {
  const std::int64_t threads = std::int64_t{grid_blocks()} * block_threads();
  const std::int64_t thread = std::int64_t{block_index()} * block_threads() + thread_index();
  const int num_topk = params.metadata.num_topk;
  for (std::int64_t at = thread; at < params.num_tokens * num_topk; at += threads) {
    const std::int64_t index = params.topk_idx.load_cached(at);
    const int expert = expert_of(index, params.num_experts * params.num_ranks);
    const std::int64_t token = at / num_topk;
    params.rows_at_owners[at] =
        expert < 0 ? -1 : params.destination_row[token * params.num_ranks + expert / params.num_experts];
    if (params.selected == nullptr) continue;
    if (params.topk_idx.is_64_bit) {
      reinterpret_cast<std::int64_t*>(params.selected)[at] = index;
    } else {
      reinterpret_cast<std::int32_t*>(params.selected)[at] = static_cast<std::int32_t>(index);
    }
  }
}

DEEP_EP_DEVICE void number_selections_body(const NumberRowsParams& params, std::byte* memory) {
  // Nothing is known of the rows of a call that has failed.
  if (aborted(params.wait)) return;
  const NumberingShared shared(Carver(memory), block_warps(), params.num_experts, params.num_experts, params.num_ranks);
  const SelectionNumbers numbers{shared, params.num_experts, block_warps(), block_index(), grid_blocks()};
  const int num_topk = params.metadata.num_topk;
  const auto rows = numbers.share_of_block(valid_rows(params), 1);
  const auto mine = numbers.share_of_warp(Share<std::int64_t>{rows.begin * num_topk, rows.end * num_topk}, kWarpSize);

  // 1. Count the selections of each warp's share.
  for (int rank = thread_index(); rank < params.num_ranks; rank += block_threads()) {
    shared.source_ends[rank] = load_weak(params.ends + rank * params.ends_stride);
  }
  numbers.clear();
  block::sync();
  for (std::int64_t at = mine.begin + lane_index(); at < mine.end; at += kWarpSize) {
    const int expert = expert_of(params.recv_topk_idx.load_cached(at), params.num_experts);
    if (expert >= 0) numbers.count(expert);
  }
  block::sync();

  // 2. Add what the others have counted, and find each expert's first row.
  const auto await_others = [&] {  // all blocks run at once, and none begins after another kernel has failed
    return wait_signal(params.wait, params.exchange.counted, {params.rank, Wanted::counts, 1});
  };
  if (!numbers.add(params.exchange, 1, shared.scratch, await_others)) return;
  if (warp_index() == 0) find_starts(shared.totals, params.num_experts, params.alignment, shared.starts);
  block::sync();
  if (block_index() == 0) write_totals(params, shared);

  // 3. Write it all down.
  number_share(params, numbers, mine);
  for (std::int64_t row = rows.begin + thread_index(); row < rows.end; row += block_threads()) {
    write_source(params, shared, row);
  }
  const std::int64_t thread = std::int64_t{block_index()} * block_threads() + thread_index();
  clear_rows(params, valid_rows(params) + thread, std::int64_t{grid_blocks()} * block_threads());
  write_rows_at_owners(params);
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(number_selections, deep_ep::device::number_selections_body)
