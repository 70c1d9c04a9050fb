// Shared memory of a block of the low-latency combine, how the block learns which call it is in, and the rows that its
// warps go through.
#pragma once

#include "kernels/low_latency/combine/announce.hpp"
#include "kernels/low_latency/combine/wire.hpp"
#include "kernels/rdma/poster.hpp"

namespace deep_ep::device::low_latency {

/// The most rows that fall to each of `groups` groups of a grid.
DEEP_EP_HOST_DEVICE constexpr int rows_of_group(int num_ranks, int max_tokens, int groups) {
  return groups == 0 ? 0 : (num_ranks * max_tokens + groups - 1) / groups;
}

/// What one thread has read for all; then, for each warp, a bit for each row that may fall to it, and where it pushes,
/// a stage: for the sums of its share of a row, or `unreduced` for a pass that it casts.
struct CombineShared {
  struct Words {
    LowLatencyEpochs epochs;
    std::uint32_t call;    ///< see call_of()
    std::uint32_t listed;  ///< selections in `list`
    MaskWords masks;
  };

  Words* words;
  rdma::PosterWords* posters;  ///< in blocks that post, instead of the rest: of each warp
  std::uint32_t* deferred_bits;
  std::byte* stages;
  std::uint32_t* list;  ///< of a send part that signals hold up: see push_signalled.hpp
  std::size_t bytes;

  /// Bytes of a warp's stage.
  DEEP_EP_HOST_DEVICE static std::size_t stage_bytes(const CombineWire& wire, const Divisor& warps_per_row,
                                                     bool unreduced) {
    if (unreduced) return wire.fp8 ? CombineWire::kFp8PassBytes : 0;
    return wire.fp8 ? WarpShare<true>{0, warps_per_row}.stage_bytes(wire)
                    : WarpShare<false>{0, warps_per_row}.stage_bytes(wire);
  }

  /// `stage_bytes`: 0 without a send part. `rows`: that may fall to a warp. `poster_warps`: 0 where nothing is posted.
  /// `selections`: that may be listed.
  DEEP_EP_HOST_DEVICE CombineShared(Carver carver, int warps, std::size_t stage_bytes, int rows, int poster_warps,
                                    int selections = 0)
      : deferred_words_((static_cast<std::size_t>(rows) + 31) / 32), stage_bytes_(stage_bytes) {
    words = carver.take<Words>();
    Carver instead = carver;
    posters = instead.take<rdma::PosterWords>(static_cast<std::size_t>(poster_warps), kLine);
    deferred_bits = carver.take<std::uint32_t>(static_cast<std::size_t>(warps) * deferred_words_, kLine);
    stages = carver.take<std::byte>(static_cast<std::size_t>(warps) * stage_bytes_, kLine);
    list = carver.take<std::uint32_t>(static_cast<std::size_t>(selections), kLine);
    bytes = carver.bytes() > instead.bytes() ? carver.bytes() : instead.bytes();
  }

  DEEP_EP_DEVICE std::uint32_t* deferred(int warp) const {
    return deferred_bits + static_cast<std::size_t>(warp) * deferred_words_;
  }
  DEEP_EP_DEVICE std::byte* stage(int warp) const { return stages + static_cast<std::size_t>(warp) * stage_bytes_; }

 private:
  std::size_t deferred_words_;  ///< of a warp
  std::size_t stage_bytes_;     ///< of a warp
};

/// Which call is this? By all threads of the block: one warp, the clerk, reads the counters for all. They are loaded
/// before anything is stored, so that the block waits once.
DEEP_EP_DEVICE LowLatencyEpochs read_epochs(const LowLatencyCombineParams& params, CombineShared::Words& shared,
                                            bool clerk) {
  if (clerk && lane_index() == 0) {
    const std::uint32_t call = sends(params.phase) ? call_of(params) : 0;
    const LowLatencyEpochs epochs = params.common.counters(LowLatencyKind::combine).epochs();
    shared.call = call;
    shared.epochs = epochs;
    note_masks(params.common, shared.masks);
  }
  block::sync();
  return shared.epochs;
}

// The rows that the dispatch brought, as the expert side of combine goes through them.

/// A received row, as a warp remembers it.
struct CombineRow {
  int source, index;
  std::int32_t rows;      ///< of the source; this one is there if `index` is below
  std::int32_t token;     ///< at the source
  std::int32_t position;  ///< in each lane that of a selection, negative: not on this rank
};

/// Groups of warps take the rows in turn. Neighbouring rows belong to different owners, so that all links are busy at
/// once.
struct ReceivedRows {
  const LowLatencyCombineParams& params;
  int group, groups;  ///< in the block

  DEEP_EP_DEVICE LowLatencyRowTable table() const {
    return {const_cast<std::int32_t*>(params.row_table), params.common.num_ranks, params.max_tokens, params.num_topk};
  }

  /// Block by block rather than group by group: with few rows every SM has some.
  DEEP_EP_DEVICE int first_item() const { return group * params.common.working_blocks + block_index(); }
  DEEP_EP_DEVICE int step() const { return groups * params.common.working_blocks; }

  /// The most rows that this lane's sources have.
  DEEP_EP_DEVICE std::int32_t most_rows() const {
    const int ranks = params.common.num_ranks;
    std::int32_t most = lane_index() < ranks ? load_stream(table().rows(lane_index())) : 0;  // nothing waits for it yet
#pragma unroll 1
    for (int source = lane_index() + kWarpSize; source < ranks; source += kWarpSize) {
      const std::int32_t rows = load_stream(table().rows(source));
      most = rows > most ? rows : most;
    }
    return most;
  }

  /// Loads what the table says of row number `item`, before it is known whether there is such a row.
  DEEP_EP_DEVICE CombineRow load_row(int item) const {
    const Divisor& ranks = params.common.num_ranks;
    CombineRow row{};
    row.index = item / ranks;
    if (row.index >= params.max_tokens) return row;
    // The sources take turns in a different order each time: otherwise a group could always meet the same one.
    row.source = (item + row.index + params.common.rank) % ranks;
    row.rows = load_stream(table().rows(row.source));
    row.token = load_stream(table().token(row.source, row.index));
    row.position = -1;
    if (params.rank_major) {
      if (lane_index() == 0) row.position = row.source * params.max_tokens + row.index;
    } else if (lane_index() < params.num_topk) {
      row.position = load_stream(table().position(row.source, row.index, lane_index()));
    }
    return row;
  }
};

}  // namespace deep_ep::device::low_latency
