// By rails: hands on the rows that ranks of other nodes have sent to this rank for its whole node, to each rank that
// has an expert of theirs, this one included. The rows already carry their tags, and say which slot of each rank is
// theirs: receivers poll them like rows of their own node.
#pragma once

#include "kernels/low_latency/dispatch/shared.hpp"
#include "kernels/low_latency/transport/reach.hpp"

namespace deep_ep::device::low_latency {

struct DispatchRelay {
  const LowLatencyDispatchParams& params;
  const DispatchShared& shared;
  LowLatencyRow row;
  DispatchReach<true> reach;

  static constexpr int kBatch = 4;  ///< lines that a lane loads at once

  /// All rows, where this warp is `part` of the `group`-th of `groups` groups. The nodes take turns, as their rows
  /// arrive at the same time.
  DEEP_EP_DEVICE void relay_rows(int group, int groups, int part) const {
    const int nodes = reach.num_nodes();
    std::uint32_t most = 0;
#pragma unroll 1
    for (int node = 0; node < nodes; ++node) {
      const std::uint32_t rows = rows_from(node);
      most = rows > most ? rows : most;
    }
    const int all = static_cast<int>(most) * nodes;
#pragma unroll 1
    for (int i = group; i < all; i += groups) {
      const int node = i % nodes;
      const int slot = i / nodes;
      if (static_cast<std::uint32_t>(slot) < rows_from(node)) relay_row(node, slot, part);
    }
  }

 private:
  DEEP_EP_DEVICE std::uint32_t rows_from(int node) const {
    return node == reach.own_node() ? 0 : shared.relayed[reach.rail_in(node)];
  }

  /// Hands on one warp's part of a row.
  DEEP_EP_DEVICE void relay_row(int node, int slot, int part) const {
    if (!reach.await_posted(reach.rail_in(node), slot)) return;
    const std::byte* const from = reach.relayed_row(params.common.local, node, slot);

    // 1. Where does it go?
    const LineLane lane;
    const auto of_head = static_cast<std::uint32_t>(lane.line);
    const LinePart head = load_line(from + lane.byte_at(of_head), of_head < row.lines());
    std::byte* const to = destination(reach.rail_in(node), head);
    const std::uint32_t destinations = warp::ballot(to != nullptr);

    // 2. Store it there.
    const auto step = static_cast<std::uint32_t>(params.warps_per_row * kWarpLines);
#pragma unroll 1
    for (std::uint32_t first = static_cast<std::uint32_t>(part * kWarpLines); first < row.lines();
         first += kBatch * step) {
      LinePart held[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const std::uint32_t line = line_of(first, i, step);
        held[i] = load_line(from + lane.byte_at(line), line < row.lines());
      }
#pragma unroll 1
      for (std::uint32_t left = destinations; left != 0; left &= left - 1) {
        std::byte* begin = warp::shuffle(to, lowest_bit(left));
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const std::uint32_t line = line_of(first, i, step);
          store_line(begin + lane.byte_at(line), held[i], line < row.lines());
        }
      }
    }
  }

  DEEP_EP_DEVICE static std::uint32_t line_of(std::uint32_t first, int i, std::uint32_t step) {
    return first + static_cast<std::uint32_t>(LineLane().line) + static_cast<std::uint32_t>(i) * step;
  }

  /// In one lane for each rank that gets the row: its place in that rank's window; else nullptr. There is room: the
  /// block has the rank's counts of this call, and a rank sends none before it has received the call before the last.
  DEEP_EP_DEVICE std::byte* destination(int source, const LinePart& head) const {
    const int lane = lane_index();
    const int k = lane < params.num_topk ? lane : 0;
    const std::uint32_t expert = header_word(head, row.selection_word(k)) & 0xffffu;
    const std::uint32_t slot = header_word(head, row.slot_word(k));
    int rank = -1;
    if (lane < params.num_topk && expert != LowLatencyRow::kNoExpert) {
      const int owner = static_cast<int>(expert) / params.num_local_experts;
      if (reach.is_of_own_node(owner)) rank = owner;
    }
    const bool leads = lowest_bit(warp::match_any(static_cast<std::uint32_t>(rank))) == lane && rank >= 0;
    const int at = slot < static_cast<std::uint32_t>(params.max_tokens) ? static_cast<int>(slot) : 0;
    return leads ? reach.row(shared.heaps[rank], source, at) : nullptr;
  }
};

}  // namespace deep_ep::device::low_latency
