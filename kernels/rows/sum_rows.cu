// Sums of rows, each of the rows that the lanes of a warp find: those of the expanded layout that a received row has,
// or those that came back for a token. A warp adds a piece of a sum, so that a few rows keep the whole device busy,
// too. Of rows that go back to their tokens' ranks it also says to which rank each goes, and what travels beside it.
#include "kernels/common/row_sum.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep::device {

/// Which row came back for each selection: rows say it themselves. What no row speaks of is left as it is, so the sums
/// ask the row again.
DEEP_EP_DEVICE void find_returned_rows(const SumRowsParams& params) {
  const std::int64_t rows = params.metadata.valid(), selections = params.num_tokens * params.metadata.num_topk;
  const std::int64_t threads = std::int64_t{grid_blocks()} * block_threads();
  for (std::int64_t row = std::int64_t{block_index()} * block_threads() + thread_index(); row < rows; row += threads) {
    const std::int64_t id = load_weak(params.metadata.row(row));
    if (id >= 0 && id < selections) params.row_of[id] = static_cast<std::int32_t>(row);
  }
}

/// By a whole warp: the row that came back for each lane's selection of `token`, -1 for none; and the token's weights.
DEEP_EP_DEVICE std::int64_t returned_row(const SumRowsParams& params, std::int64_t num_rows, std::int64_t token,
                                         bool with_weights) {
  const RowMetadata& beside = params.metadata;
  // 1. A lane for each selection: does the rank that has its expert come last with it?
  const int lane = lane_index();
  const std::int64_t at = token * beside.num_topk + lane;
  const std::int64_t index = lane < beside.num_topk ? params.topk_idx.load_cached(at) : -1;
  const int expert = expert_of(index, params.num_experts * params.num_ranks);
  const bool chosen = expert >= 0;
  // Lanes without a selection are alone with their number, which no rank has.
  const auto owner = static_cast<std::uint32_t>(chosen ? expert / params.num_experts : -1 - lane);
  const int last = highest_bit(warp::match_any(owner));

  // 2. Which row came for it? The row must say the same.
  std::int64_t row = -1;
  if (chosen && (params.each_selection || last == lane)) {
    row = load_weak(params.row_of + at);
    if (row < 0 || row >= num_rows || load_weak(beside.row(row)) != at) row = -1;
  }

  // 3. Weights, from the row of the rank that has the expert.
  if (params.weights == nullptr || !with_weights) return row;
  const std::int64_t carrier = warp::shuffle(row, last);
  const bool told = chosen && carrier >= 0;
  if (lane < beside.num_topk) params.weights[at] = told ? load_weak(beside.row(carrier) + 1 + lane) : 0;
  return row;
}

/// By a whole warp: what is said of the rows that go back for a received one.
DEEP_EP_DEVICE void address(const SumRowsParams& params, std::int64_t row) {
  const Divisor& num_topk = params.metadata.num_topk;
  const int lane = lane_index();
  const std::int32_t origin = load_weak(params.metadata.row(row));
  const std::int32_t source = origin < 0 ? -1 : origin / params.max_tokens;
  if (source < 0 || source >= params.num_ranks) return;
  // The row that the lane sends, and the selection that it belongs to: the lane's own, or the last one.
  std::int64_t sent = lane == 0 ? row : -1;
  int selection = lane;
  if (params.each_selection) {
    sent = lane < num_topk ? load_weak(params.metadata.slots(row) + lane) : -1;
    if (sent >= params.num_rows) return;
  } else if (lane == 0) {
    selection = load_weak(params.metadata.row(row) + 1) % num_topk;
  }
  const int columns = params.sent_weights != nullptr ? 1 + num_topk : 1;
  if (sent >= 0) {
    params.is_token_in_rank[sent * params.num_ranks + source] = 1;
    params.beside[sent * columns] = (origin - source * params.max_tokens) * num_topk + selection;
  }
  if (params.sent_weights != nullptr && lane < num_topk) {
    const std::int64_t slot =
        params.sums != nullptr ? load_weak(params.metadata.slots(row) + lane) : row * num_topk + lane;
    const bool there = params.sums == nullptr || (slot >= 0 && slot < params.num_rows);
    reinterpret_cast<float*>(params.beside + row * columns)[1 + lane] =
        there ? load_weak(params.sent_weights + slot) : 0.0f;
  }
}

/// By a whole warp: what begins `offset` bytes into sum `number`: biases, then rows in the order of the lanes.
DEEP_EP_DEVICE void sum_piece(const SumRowsParams& params, std::int64_t num_rows, std::int64_t number,
                              std::uint32_t offset) {
  std::int64_t row = -1;
  if (params.row_of != nullptr) {
    row = returned_row(params, num_rows, number, offset == 0);
  } else if (lane_index() < params.metadata.num_topk) {
    row = load_weak(params.metadata.slots(number) + lane_index());
  }
  const int vectors = RowSum::vectors_at(offset, params.row_bytes);
  const std::int64_t at = number * params.row_bytes + offset;
  RowSum sum;
  for (const std::byte* bias : params.bias) {
    if (bias != nullptr) sum.add_row(bias + at, vectors);
  }
  // As a number, because a lane may have none.
  const auto address =
      reinterpret_cast<std::uint64_t>(params.rows) + static_cast<std::uint64_t>(row) * params.row_bytes;
  sum.add_rows(address, warp::ballot(row >= 0 && row < num_rows), offset, vectors);
  sum.store(params.sums + at, vectors);
}

DEEP_EP_DEVICE void sum_rows_body(const SumRowsParams& params, std::byte* /*shared*/) {
  const bool returned = params.row_of != nullptr;
  if (returned && params.sums == nullptr) return find_returned_rows(params);
  const std::int64_t valid = params.metadata.valid();
  const std::int64_t sums = returned ? params.num_tokens : valid, num_rows = returned ? valid : params.num_rows;
  const auto units = static_cast<int>(sums * params.pieces);
  for (int unit = block_index() * block_warps() + warp_index(); unit < units; unit += grid_blocks() * block_warps()) {
    const std::int64_t number = unit / params.pieces;
    const auto offset = static_cast<std::uint32_t>(unit % params.pieces) * RowSum::kPieceBytes;
    if (offset == 0 && params.beside != nullptr) address(params, number);
    if (params.sums != nullptr) sum_piece(params, num_rows, number, offset);
  }
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(sum_rows, deep_ep::device::sum_rows_body)
