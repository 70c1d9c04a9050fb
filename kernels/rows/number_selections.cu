// An index of received rows: where each came from, how many selections each expert has, and the row of each selection
// in the expanded layout: by expert, then by received row, then by selection.
//
// Warps take the selections in order, each its share. How many of an expert lie before a warp's share is what earlier
// blocks have counted, and earlier warps of its own block.
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/warp.hpp"
#include "kernels/rows/shares.hpp"
#include "kernels/rows/tables.hpp"

namespace deep_ep::device {

/// What all blocks, and those before this one, have counted of each expert. Warps share the blocks, whose counts they
/// load in groups.
DEEP_EP_DEVICE void add_block_counts(const NumberRowsParams& params, const NumberRowsShared& shared) {
  for (int expert = lane_index(); expert < params.num_experts; expert += kWarpSize) {
    std::int32_t before = 0, total = 0;
#pragma unroll 8
    for (int block = warp_index(); block < grid_blocks(); block += block_warps()) {
      const std::int32_t count = load_weak(params.block_counts + std::int64_t{block} * params.num_experts + expert);
      total += count;
      before += block < block_index() ? count : 0;
    }
    fetch_add_relaxed<Scope::block>(&shared.before[expert], before);
    fetch_add_relaxed<Scope::block>(&shared.totals[expert], total);
  }
}

/// The same for few selections: each block counts all of them.
DEEP_EP_DEVICE void count_all_selections(const NumberRowsParams& params, const NumberRowsShared& shared) {
  const std::int64_t end = valid_rows(params) * params.metadata.num_topk;
  const std::int64_t begin = selections_of_block(params).begin;
#pragma unroll 8
  for (std::int64_t at = thread_index(); at < end; at += block_threads()) {
    const int expert = expert_of(params.recv_topk_idx.load_cached(at), params.num_experts);
    if (expert < 0) continue;
    fetch_add_relaxed<Scope::block>(&shared.totals[expert], 1);
    if (at < begin) fetch_add_relaxed<Scope::block>(&shared.before[expert], 1);
  }
}

/// By one block: what is said of each source and each expert.
DEEP_EP_DEVICE void write_totals(const NumberRowsParams& params, const NumberRowsShared& shared) {
  for (int rank = thread_index(); rank < params.num_ranks; rank += block_threads()) {
    // Of rows that had no room nothing is known but their number, and nothing of theirs may be looked for.
    const std::int64_t end = shared.ends[rank];
    params.source_ends[rank] =
        static_cast<std::int32_t>(end < params.metadata.num_rows ? end : params.metadata.num_rows);
  }
  for (int expert = thread_index(); expert < params.num_experts; expert += block_threads()) {
    write_expert(params, expert, shared.totals[expert], shared.starts[expert], params.alignment);
  }
}

/// By a whole warp: numbers the selections of its share. `next` is the warp's own.
DEEP_EP_DEVICE void number_share(const NumberRowsParams& params, const Share& share, std::int32_t* next) {
  const int num_topk = params.metadata.num_topk;
  for (std::int64_t first = share.begin; first < share.end; first += kWarpSize) {
    const std::int64_t at = first + lane_index();
    const bool there = at < share.end;
    const int expert = there ? expert_of(params.recv_topk_idx.load_cached(at), params.num_experts) : -1;
    std::int32_t slot = -1;
    if (params.expand) {
      const std::uint32_t same = warp::match_any(static_cast<std::uint32_t>(expert));
      const std::uint32_t earlier = same & ((1u << lane_index()) - 1);
      if (expert >= 0) slot = next[expert] + count_bits(earlier);
      warp::sync();
      if (expert >= 0 && earlier == 0) next[expert] += count_bits(same);
      warp::sync();
    }
    if (!there) continue;
    const std::int64_t row = at / num_topk;
    params.metadata.slots(row)[at - row * num_topk] = slot;
    params.local[at] = expert;
  }
}

/// By a thread: where a valid row came from.
DEEP_EP_DEVICE void write_source(const NumberRowsParams& params, const NumberRowsShared& shared, std::int64_t row) {
  const int num_topk = params.metadata.num_topk;
  int source = 0;
  for (int behind = params.num_ranks; source < behind;) {  // the first one whose rows end behind this one
    const int middle = (source + behind) / 2;
    if (shared.ends[middle] > row) {
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
  if (load_relaxed<Scope::gpu>(params.abort) != 0) return;
  const NumberRowsShared shared(Carver(memory), block_warps(), params.num_experts, params.num_ranks);
  const Share rows = rows_of_block(params);
  const Share mine = part_of(selections_of_block(params), warp_index(), block_warps(), kWarpSize);
  std::int32_t* const next = shared.next + std::int64_t{warp_index()} * params.num_experts;

  // 1. Count the selections of each warp's share.
  for (int rank = thread_index(); rank < params.num_ranks; rank += block_threads()) {
    shared.ends[rank] = load_weak(params.ends + rank * params.ends_stride);
  }
  for (int expert = thread_index(); expert < params.num_experts; expert += block_threads()) {
    shared.before[expert] = shared.totals[expert] = 0;
  }
  for (int expert = lane_index(); expert < params.num_experts; expert += kWarpSize) next[expert] = 0;
  block::sync();
  for (std::int64_t at = mine.begin + lane_index(); at < mine.end; at += kWarpSize) {
    const int expert = expert_of(params.recv_topk_idx.load_cached(at), params.num_experts);
    if (expert >= 0) fetch_add_relaxed<Scope::block>(&next[expert], 1);
  }

  // 2. Find each expert's first row, and how many of its selections lie before this block.
  if (params.block_counts != nullptr) {
    add_block_counts(params, shared);
  } else {
    count_all_selections(params, shared);
  }
  block::sync();
  if (warp_index() == 0) find_starts(shared.totals, params.num_experts, params.alignment, shared.starts);
  block::sync();
  if (block_index() == 0) write_totals(params, shared);

  // 3. Each warp's first row of each expert.
  for (int expert = thread_index(); expert < params.num_experts; expert += block_threads()) {
    std::int32_t row = shared.starts[expert] + shared.before[expert];
    for (int warp = 0; warp < block_warps(); ++warp) {
      std::int32_t& of_warp = shared.next[std::int64_t{warp} * params.num_experts + expert];
      const std::int32_t count = of_warp;
      of_warp = row;
      row += count;
    }
  }
  block::sync();

  // 4. Write it all down.
  number_share(params, mine, next);
  for (std::int64_t row = rows.begin + thread_index(); row < rows.end; row += block_threads()) {
    write_source(params, shared, row);
  }
  const std::int64_t thread = std::int64_t{block_index()} * block_threads() + thread_index();
  clear_rows(params, valid_rows(params) + thread, std::int64_t{grid_blocks()} * block_threads());
  write_rows_at_owners(params);
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(number_selections, deep_ep::device::number_selections_body)
