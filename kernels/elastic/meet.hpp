// How ranks meet at a call of the second interface: each tells all that it has come, so that its window is free, and
// with which rows.
#pragma once

#include "kernels/common/row_comparison.hpp"
#include "kernels/normal/params.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device {

/// What a rank says when it has come.
struct Arrival {
  std::uint32_t row_bytes;
  std::uint32_t beside;  ///< what must agree of what travels beside rows
  std::uint32_t num_topk;
  std::uint32_t max_tokens;
  std::uint64_t fingerprint;  ///< of all else
};

struct Meeting {
  const IntranodeParams& common;
  const WaitContext& wait;
  Wanted wanted;
  int slot;  ///< of the cells: see ControlWindow
  std::uint64_t epoch;

  DEEP_EP_DEVICE Awaited awaited(int rank) const { return {rank, wanted, epoch}; }

  /// By all threads of one block.
  DEEP_EP_DEVICE void announce(const Arrival& ours) const {
    for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
      Cell* const cells = common.control.elastic_arrival(common.heaps[peer], slot, common.rank).cells;
      store_cell(cells, std::uint64_t{ours.beside} << 32 | ours.row_bytes, epoch);
      store_cell(cells + 1, std::uint64_t{ours.max_tokens} << 32 | ours.num_topk, epoch);
      store_cell(cells + 2, ours.fingerprint, epoch);
    }
  }

  /// Waits until `rank` has come. False after a fault. No acquire is needed for what its calls before have read: their
  /// kernels have ended.
  DEEP_EP_DEVICE bool hear(int rank, Arrival& theirs) const {
    const Cell* const cells = common.control.elastic_arrival(common.own_heap(), slot, rank).cells;
    return wait_until(ReportLateHere{{wait}}, awaited(rank), [&](Poll& poll) {
      const Cell first = load_cell(cells), second = load_cell(cells + 1), third = load_cell(cells + 2);
      theirs = {static_cast<std::uint32_t>(first.payload), static_cast<std::uint32_t>(first.payload >> 32),
                static_cast<std::uint32_t>(second.payload), static_cast<std::uint32_t>(second.payload >> 32),
                third.payload};
      poll.seen = first.epoch;
      return first.epoch >= epoch && second.epoch >= epoch && third.epoch >= epoch;
    });
  }

  /// By all threads of a block: waits until all ranks have come, and compares their rows with ours. `beside` names what
  /// is beside them. False after a fault that this thread has met.
  DEEP_EP_DEVICE bool hear_all(const Arrival& ours, RowField beside) const {
    bool good = true;
    for (int peer = thread_index(); peer < common.num_ranks; peer += block_threads()) {
      Arrival theirs;
      if (!hear(peer, theirs)) return false;
      RowComparison rows;
      rows.compare(RowField::row_bytes, ours.row_bytes, theirs.row_bytes);
      rows.compare(beside, ours.beside, theirs.beside);
      rows.compare(RowField::num_topk, ours.num_topk, theirs.num_topk);
      rows.compare(RowField::max_tokens, ours.max_tokens, theirs.max_tokens);
      const ElasticArrival& own = common.control.elastic_arrival(common.own_heap(), slot, common.rank);
      good = rows.agrees(wait, &own.cells[0].epoch, common.rank, awaited(peer)) && good;
    }
    return good;
  }
};

}  // namespace deep_ep::device
