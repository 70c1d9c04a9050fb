// The relaying warps of combine: for a token of their rail in another node, they add up what the ranks of this node
// hold, by rank and in fp32, and stage the sum, rounded once, as the one row that crosses the network.
#pragma once

#include "kernels/internode/combine_rows.hpp"

namespace deep_ep::device::internode {

struct CombineRelay {
  const InternodeCombineParams& params;
  const NodeRows* ranks;
  std::uint64_t call;
  std::int32_t* next;  ///< [other nodes], of the warp

  DEEP_EP_DEVICE const NodeGrid& grid() const { return params.transfer.common.grid; }
  DEEP_EP_DEVICE const Rings& rings() const { return params.transfer.rings; }
  /// In combine, what came from a node goes back to it.
  DEEP_EP_DEVICE int rows_for(int number) const { return params.transfer.counts.to_node[grid().other(number)]; }

  DEEP_EP_DEVICE void stage(int number, int row) const {
    const RowAdder adder{params};
    const std::int64_t relayed = rows_before(number) + row;
    const auto find = [&](int index) {
      if (index >= grid().width || relayed >= params.transfer.relay_rows_room) return FoundRow{};
      return adder.row_of(ranks[index], load_stream(params.relay_rows + relayed * grid().width + index));
    };
    std::byte* to = rings().staging(number, row).in(params.transfer.common.own_heap());
    auto* weights = params.num_topk != 0 ? reinterpret_cast<float*>(to + params.row_bytes) : nullptr;
    adder.add(to, weights, grid().width, find, [](RowSum&, std::uint32_t, int) {});
    warp::sync();  // the lanes' stores come before the count
    if (lane_index() == 0) {
      fetch_add_release<Scope::gpu>(params.transfer.common.staged + rings().counter(number, rings().chunk_of(row)),
                                    std::uint32_t{1});
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

  /// Stages this warp's share, which is every `step`th row: so the first chunks are whole soon. False after a fault.
  /// The warp waits for the posting lanes only, which know for whom they wait, and for how long.
  DEEP_EP_DEVICE bool stage_all(int first, int step) const {
    WaitContext without_end = params.transfer.wait;
    without_end.timeout_ns = 0;
    return serve(
        grid(), without_end, next, first, step, [&](int number) { return rows_for(number); },
        [&](int number) { return stageable_chunks(params.transfer, call, number) * rings().chunk_rows; },
        [&](int number, int row) {
          stage(number, row);
          return true;
        },
        [](int, int) {});
  }
};

}  // namespace deep_ep::device::internode
