// The relaying warps of combine: for a token of their rail in another node, they add up what the ranks of this node
// hold, by rank and in fp32, and stage the sum, rounded once, as the one row that crosses the network.
#pragma once

#include "kernels/internode/combine_rows.hpp"

namespace deep_ep::device::internode {

template <bool kLanes>
struct CombineRelay {
  const InternodeCombineParams& params;
  const NodeRows* ranks;
  PushedRows pushed;
  std::uint64_t call;
  std::int32_t* next;  ///< [other nodes], of the warp
  bool near;           ///< some rank of this node pushes its rows

  DEEP_EP_DEVICE const NodeGrid& grid() const { return params.transfer.common.grid; }
  DEEP_EP_DEVICE const Rings& rings() const { return params.transfer.rings; }
  /// In combine, what came from a node goes back to it.
  DEEP_EP_DEVICE int rows_for(int number) const { return params.transfer.counts.to_node[grid().other(number)]; }

  /// The row that rank `index` of this node has of row number `relayed`; -1: none.
  DEEP_EP_DEVICE std::int32_t place_at(std::int64_t relayed, int index) const {
    if (index >= grid().width || relayed >= params.transfer.relay_rows_room) return -1;
    return load_stream(params.relay_rows + relayed * grid().width + index);
  }
  /// If the rank pushes it: its number in its queue. -1 if not.
  DEEP_EP_DEVICE std::int32_t pushed_at(int number, std::int64_t relayed, int index) const {
    if (!near || index >= grid().width) return -1;
    return pushed.number_of(ranks, index, grid().other(number), place_at(relayed, index));
  }
  /// By one lane: the first rank whose part of the row it pushes and has not yet, -1 if there is none; acquires.
  DEEP_EP_DEVICE int missing_from(int number, int row) const {
    const std::int64_t relayed = rows_before(number) + row;
    for (int index = 0; index < grid().width; ++index) {
      const std::int32_t n = pushed_at(number, relayed, index);
      if (n >= 0 && !pushed.is_there(index, grid().other(number), n)) return index;
    }
    return -1;
  }
  /// By one lane: the row has been waited for too long. Not by a rank of this node if all of it is there: the warp
  /// waits for room in the staging ring then, that is for the posting lanes, or a warp that has an earlier row to wait
  /// for.
  template <class IsLate>
  DEEP_EP_DEVICE bool report_late(int number, int row, IsLate is_late) const {
    const int from = missing_from(number, row);
    if (from < 0 || !is_late(grid().first_of_node() + from, Wanted::internode_near_rows)) return false;
    pushed.report_late(from, grid().other(number), pushed_at(number, rows_before(number) + row, from));
    return true;
  }

  DEEP_EP_DEVICE void stage(int number, int row) const {
    const RowPlaces places{params};
    const std::int64_t relayed = rows_before(number) + row;
    const auto find = [&](int index) {
      if (const std::int32_t n = pushed_at(number, relayed, index); n >= 0) {
        return places.in_slot(pushed.row(index, grid().other(number), n));
      }
      const std::int32_t place = place_at(relayed, index);
      return place < 0 ? FoundRow{} : places.row_of(ranks[index], place);
    };
    std::byte* to = rings().staging(number, row).in(params.transfer.common.own_heap());
    const RowReduction reduction(grid().width, find);
    reduction.add(to, params.row_bytes, {});
    if (params.num_topk != 0) {
      reduction.add_weights(reinterpret_cast<float*>(to + params.row_bytes), params.num_topk);
    }
    if (!near) return;
    warp::sync();  // all lanes have read
    for (int index = lane_index(); index < grid().width; index += kWarpSize) {
      const std::int32_t n = pushed_at(number, relayed, index);
      if (n >= 0) pushed.give_back(index, grid().other(number), n);
    }
  }

  // A warp takes two rows of a chunk at a time, so that one fence serves for both; and one where ranks push, as two may
  // not fit their windows at once.

  DEEP_EP_DEVICE int share_rows() const { return near ? 1 : Rings::kShareRows; }
  DEEP_EP_DEVICE const Divisor& shares_of_chunk() const { return near ? rings().chunk_rows : rings().shares; }
  DEEP_EP_DEVICE int chunk_of(int share) const { return share / shares_of_chunk(); }
  DEEP_EP_DEVICE int first_row(int share) const {
    return chunk_of(share) * rings().chunk_rows + share % shares_of_chunk() * share_rows();
  }

  /// Of so many rows: none is empty, as nobody would push it.
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
      add_release<Scope::gpu>(params.transfer.common.staged + rings().counter(number, chunk),
                              static_cast<std::uint32_t>(rows));
    }
  }

  /// Tokens that came from the nodes before.
  DEEP_EP_DEVICE std::int64_t rows_before(int number) const {
    std::int64_t before = 0;
    for (int node = 0; node < grid().other(number); ++node) {
      if (node != grid().node()) before += params.transfer.counts.to_node[node];
    }
    return before;
  }

  /// How many shares of a node's rows may be staged.
  DEEP_EP_DEVICE int stageable(int number) const {
    if constexpr (!kLanes) return stageable_chunks<kLanes>(params.transfer, call, number, 0) * shares_of_chunk();
    return is_stageable<kLanes>(params.transfer, call, number, chunk_of(next[number])) ? next[number] + 1 : 0;
  }

  /// Stages this warp's share, which is every `step`th one of each node: so the first chunks are whole soon. False
  /// after a fault. Where nobody pushes, the warp waits for the posting lanes only, which know for whom they wait, and
  /// for how long.
  DEEP_EP_DEVICE bool stage_all(int first, int step) const {
    WaitContext wait = params.transfer.wait;
    if (!near) {
      wait.timeout_ns = 0;
      wait.control = nullptr;
    }
    return serve(
        grid().others(), wait, next, first, step, [&](int number) { return shares_of(rows_for(number)); },
        [&](int number) {
          const int ready = stageable(number);
          return near && next[number] < ready && missing_from(number, first_row(next[number])) >= 0 ? 0 : ready;
        },
        [&](int number, int share) {
          stage_share(number, share);
          return true;
        },
        [&](int number, int share, auto is_late) { return report_late(number, first_row(share), is_late); });
  }
};

}  // namespace deep_ep::device::internode
