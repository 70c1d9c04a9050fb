// How ranks of a node meet at a call: each tells all that it has come, so that its memory is free, and with which rows.
#pragma once

#include "kernels/common/row_comparison.hpp"
#include "kernels/normal/params.hpp"
#include "kernels/primitives/block.hpp"

namespace deep_ep::device {

/// What a rank says when it has come.
struct Arrival {
  std::uint32_t row_bytes = 0, num_scales = 0, num_topk = 0, max_tokens = 0;
  std::uint64_t kind = 0;  ///< a number made of all else that must agree
};

template <class Policy>
struct Meeting {
  const IntranodeParams& common;
  Policy wait;  ///< ReportLate, or ReportLateHere

  Wanted wanted;
  int slot;  ///< of the cells: see ControlWindow
  std::uint64_t epoch;
  int first_rank = 0;  ///< of the node, in words of a fault record

  DEEP_EP_DEVICE Awaited awaited(int rank) const { return {first_rank + rank, wanted, epoch}; }

  /// By all threads of one block.
  DEEP_EP_DEVICE void announce(const Arrival& ours) const {
    block::each(common.num_ranks, [&](int peer) {
      Cell* const cells = common.control.arrival(common.heaps[peer], slot, common.rank).cells;
      store_cell(cells, std::uint64_t{ours.num_scales} << 32 | ours.row_bytes, epoch);
      store_cell(cells + 1, std::uint64_t{ours.max_tokens} << 32 | ours.num_topk, epoch);
      store_cell(cells + 2, ours.kind, epoch);
    });
  }

  /// Waits until `rank` has come. False after a fault. No acquire is needed for what its calls before have read: their
  /// kernels have ended.
  DEEP_EP_DEVICE bool hear(int rank, Arrival& theirs) const {
    const Cell* const cells = common.control.arrival(common.own_heap(), slot, rank).cells;
    return wait_until(wait, awaited(rank), [&](Poll& poll) {
      const Cell first = load_cell(cells), second = load_cell(cells + 1), third = load_cell(cells + 2);
      theirs = {static_cast<std::uint32_t>(first.payload), static_cast<std::uint32_t>(first.payload >> 32),
                static_cast<std::uint32_t>(second.payload), static_cast<std::uint32_t>(second.payload >> 32),
                third.payload};
      poll.seen = first.epoch;
      return first.epoch >= epoch && second.epoch >= epoch && third.epoch >= epoch;
    });
  }

  /// By all threads of a block: waits until all ranks have come, and compares their rows with ours. False after a fault
  /// that this thread has met.
  DEEP_EP_DEVICE bool hear_all(const Arrival& ours) const {
    bool good = true;
    block::each(common.num_ranks, [&](int peer) {
      Arrival theirs;
      good = good && hear(peer, theirs);
      if (!good) return;
      RowComparison rows;
      rows.compare(RowField::row_bytes, ours.row_bytes, theirs.row_bytes);
      rows.compare(RowField::num_scales, ours.num_scales, theirs.num_scales);
      rows.compare(RowField::num_topk, ours.num_topk, theirs.num_topk);
      rows.compare(RowField::max_tokens, ours.max_tokens, theirs.max_tokens);
      rows.compare(RowField::kind, static_cast<std::int64_t>(ours.kind), static_cast<std::int64_t>(theirs.kind));
      const ArrivalCells& own = common.control.arrival(common.own_heap(), slot, common.rank);
      good = rows.agrees(wait.context, &own.cells[0].epoch, first_rank + common.rank, awaited(peer));
    });
    return good;
  }
};

}  // namespace deep_ep::device
