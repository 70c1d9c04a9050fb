// The relaying warps of combine: for a token of their rail in another node, they add up what the ranks of this node
// hold, by rank and in fp32, and stage the sum, rounded once, as the one row that crosses the network.
#pragma once

#include "kernels/internode/combine_rows.hpp"

namespace deep_ep::device::internode {

struct CombineRelay {
  const LocalRows& local;
  std::int32_t* next;  ///< [other nodes], of the warp

  DEEP_EP_DEVICE const InternodeCombineParams& params() const { return local.params; }
  DEEP_EP_DEVICE const TransferParams& transfer() const { return local.params.transfer; }
  DEEP_EP_DEVICE const NodeGrid& grid() const { return local.grid(); }
  DEEP_EP_DEVICE const Rings& rings() const { return transfer().rings; }
  /// In combine, what came from a node goes back to it.
  DEEP_EP_DEVICE int rows_for(int number) const { return transfer().counts.to_node[grid().other(number)]; }
  DEEP_EP_DEVICE std::int64_t relayed(int number, int row) const {
    return rows_before(grid(), transfer().counts.to_node, number) + row;
  }

  /// The row that rank `index` of this node has of row number `relayed`; -1: none.
  DEEP_EP_DEVICE std::int32_t place_at(std::int64_t relayed, int index) const {
    if (index >= grid().width || relayed >= transfer().relay_rows_room) return -1;
    return load_stream(params().relay_rows + relayed * grid().width + index);
  }
  /// By one lane: the first of the pushed rows that is not there yet. Without a word if all are: then the warp waits
  /// for room in the staging ring, that is for the posters, or for a warp that waits with an earlier row.
  DEEP_EP_DEVICE AwaitedWord missing(int number, int row) const {
    const std::int64_t at = relayed(number, row);
    for (int index = 0; local.by_rings && index < grid().width; ++index) {
      const AwaitedWord part = local.awaited(index, grid().other(number), place_at(at, index));
      if (part.word != nullptr && !part.is_reached()) return part;
    }
    return {};
  }

  DEEP_EP_DEVICE void stage(int number, int row) const {
    const int node = grid().other(number);
    const std::int64_t at = relayed(number, row);
    const auto find = [&](int index) {
      const std::int32_t place = place_at(at, index);
      return place < 0 ? FoundRow{} : local.find(index, node, place);
    };
    std::byte* to = rings().staging(number, row).in(transfer().common.own_heap());
    const RowReduction reduction(grid().width, find);
    reduction.add(to, params().row_bytes, {});
    if (params().num_topk != 0) {
      reduction.add_weights(reinterpret_cast<float*>(to + params().row_bytes), params().num_topk);
    }
    if (!local.by_rings) return;
    warp::sync();  // all lanes have read
    for (int index = lane_index(); index < grid().width; index += kWarpSize) {
      local.release(index, node, place_at(at, index));
    }
  }

  // A warp takes two rows of a chunk at a time, so that one fence serves for both; and one where ranks push, as two may
  // not fit their rings at once.

  DEEP_EP_DEVICE int share_rows() const { return local.by_rings ? 1 : Rings::kShareRows; }
  DEEP_EP_DEVICE const Divisor& shares_of_chunk() const { return local.by_rings ? rings().chunk_rows : rings().shares; }
  DEEP_EP_DEVICE int chunk_of(int share) const { return share / shares_of_chunk(); }
  DEEP_EP_DEVICE int first_row(int share) const {
    return chunk_of(share) * rings().chunk_rows + share % shares_of_chunk() * share_rows();
  }

  /// Of so many rows: none is empty, as no rank would push it.
  DEEP_EP_DEVICE int shares_of(int rows) const {
    const int chunks = rings().chunk_of(rows);
    const int rest = rows - chunks * rings().chunk_rows;
    return chunks * shares_of_chunk() + (rest + share_rows() - 1) / share_rows();
  }

  DEEP_EP_DEVICE void stage_share(int number, int share) const {
    const int chunk = chunk_of(share);
    const int first = first_row(share);
    const int left = chunk * rings().chunk_rows + rings().rows_in(chunk, rows_for(number)) - first;
    const int rows = left < share_rows() ? left : share_rows();
#pragma unroll 1
    for (int row = first; row < first + rows; ++row) stage(number, row);
    warp::sync();  // the lanes' stores come before the count
    if (lane_index() == 0) {
      add_release<Scope::gpu>(transfer().common.staged + rings().counter(number, chunk),
                              static_cast<std::uint32_t>(rows));
    }
  }

  /// Stages this warp's shares, which are every `step`th one of each node: so the first chunks are whole soon. False
  /// after a fault. If no rank pushes, the warp waits for the posters only, which know for which rank they wait, and
  /// for how long.
  DEEP_EP_DEVICE bool stage_all(int first, int step) const {
    return serve(
        grid().others(), transfer().wait, next, first, step, [&](int number) { return shares_of(rows_for(number)); },
        [&](int number) {
          return is_stageable(transfer(), local.call, number, chunk_of(next[number])) &&
                 missing(number, first_row(next[number])).word == nullptr;
        },
        [&](int number, int share) {
          stage_share(number, share);
          return true;
        },
        [&](int number, int share) { return missing(number, first_row(share)); });
  }
};

}  // namespace deep_ep::device::internode
