// Which rows go back to which rank, and what each carries for its token. A warp takes a row of the metadata.
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/warp.hpp"
#include "kernels/rows/shares.hpp"

namespace deep_ep::device {

/// By a thread of a valid row: is there a row of the expanded layout for selection k?
DEEP_EP_DEVICE bool is_sent(const AddressRowsParams& params, std::int64_t row, int k) {
  const std::int32_t slot = load_weak(params.metadata.slots(row) + k);
  return slot >= 0 && slot < params.num_sent;
}

/// The rank that a valid row is from; -1: from none, so it goes nowhere.
DEEP_EP_DEVICE std::int32_t source_of(const AddressRowsParams& params, std::int32_t origin) {
  const std::int32_t source = origin < 0 ? -1 : origin / params.max_tokens;
  return source < params.num_ranks ? source : -1;
}

/// By a block that counts: how many rows of its share go to each rank. One that is alone says it to everybody.
DEEP_EP_DEVICE void count_rows(const AddressRowsParams& params, std::int64_t valid, std::int32_t* counts) {
  const Share share = part_of({0, valid}, block_index(), params.counting_blocks, 1);
  for (int rank = thread_index(); rank < params.num_ranks; rank += block_threads()) counts[rank] = 0;
  block::sync();
  for (std::int64_t row = share.begin + thread_index(); row < share.end; row += block_threads()) {
    const std::int32_t source = source_of(params, load_weak(params.metadata.row(row)));
    if (source < 0) continue;
    int rows = 1;
    if (params.each_selection) {
      rows = 0;
      for (int k = 0; k < params.metadata.num_topk; ++k) rows += is_sent(params, row, k) ? 1 : 0;
    }
    if (rows != 0) fetch_add_relaxed<Scope::block>(&counts[source], rows);
  }
  block::sync();
  std::int32_t* const told = params.counting_blocks == 1
                                 ? params.num_tokens_per_rank
                                 : params.block_counts + std::int64_t{block_index()} * params.num_ranks;
  for (int rank = thread_index(); rank < params.num_ranks; rank += block_threads()) told[rank] = counts[rank];
}

/// By a lane: the weight of selection k of a row.
DEEP_EP_DEVICE float weight_of(const AddressRowsParams& params, std::int64_t row, int k) {
  if (!params.weights_of_slots) return load_weak(params.weights + row * params.metadata.num_topk + k);
  const std::int32_t slot = load_weak(params.metadata.slots(row) + k);
  return slot >= 0 && slot < params.num_weights ? load_weak(params.weights + slot) : 0.0f;
}

DEEP_EP_DEVICE void address_rows_body(const AddressRowsParams& params, std::byte* memory) {
  const std::int64_t valid = params.metadata.valid();
  const int num_topk = params.metadata.num_topk;
  if (block_index() < params.counting_blocks) count_rows(params, valid, reinterpret_cast<std::int32_t*>(memory));

  const std::int64_t warps = std::int64_t{grid_blocks()} * block_warps();
  const std::int64_t rows = params.each_selection ? valid : params.metadata.num_rows;
  for (std::int64_t row = std::int64_t{block_index()} * block_warps() + warp_index(); row < rows; row += warps) {
    const bool there = row < valid;
    const std::int32_t origin = there ? load_weak(params.metadata.row(row)) : -1;
    const std::int32_t source = source_of(params, origin);
    const std::int32_t first_id = (origin - source * params.max_tokens) * num_topk;

    // 1. Each selection's row by itself.
    if (params.each_selection) {
      if (lane_index() < num_topk && source >= 0 && is_sent(params, row, lane_index())) {
        const std::int64_t slot = load_weak(params.metadata.slots(row) + lane_index());
        params.is_token_in_rank[slot * params.num_ranks + source] = 1;
        params.beside[slot * params.columns] = first_id + lane_index();
      }
      continue;
    }

    // 2. Or the received row, under its last selection.
    for (int rank = lane_index(); rank < params.num_ranks; rank += kWarpSize) {
      params.is_token_in_rank[row * params.num_ranks + rank] = rank == source ? 1 : 0;
    }
    if (source < 0) continue;
    std::int32_t* const beside = params.beside + row * params.columns;
    if (lane_index() == 0) {
      beside[0] = first_id + (num_topk == 0 ? 0 : load_weak(params.metadata.row(row) + 1) % num_topk);
    }
    if (params.weights != nullptr && lane_index() < num_topk) {
      reinterpret_cast<float*>(beside)[1 + lane_index()] = weight_of(params, row, lane_index());
    }
  }
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(address_rows, deep_ep::device::address_rows_body)
