// How ranks of a node meet at a call: each tells all that it has come, so that its memory is free, and with which rows.
#pragma once

#include <cstring>

#include "kernels/common/row_comparison.hpp"
#include "kernels/normal/params.hpp"
#include "kernels/primitives/block.hpp"

namespace deep_ep::device {

/// By one thread: tells the rank whose mailbox it is.
template <class Message>
DEEP_EP_DEVICE void tell(Mailbox<Message>& box, const Message& message, std::uint64_t epoch) {
  std::uint64_t words[Mailbox<Message>::kCells];
  memcpy(words, &message, sizeof(Message));
#pragma unroll
  for (int i = 0; i < Mailbox<Message>::kCells; ++i) store_cell(box.cells + i, words[i], epoch);
}

/// By one thread: waits for the message of call `awaited.expected`. False after a fault. Acquires nothing, and need not
/// for what calls before have read and written: their kernels have ended. What this kernel reads of the other rank's
/// memory needs a fence behind it.
template <class Message>
DEEP_EP_DEVICE bool hear(const ReportLate& policy, const Mailbox<Message>& box, const Awaited& awaited,
                         Message& message) {
  constexpr int kCells = Mailbox<Message>::kCells;
  std::uint64_t words[kCells];
  const bool came = wait_until(policy, awaited, [&](Poll& poll) {
    bool all = true;
#pragma unroll
    for (int i = 0; i < kCells; ++i) {
      const Cell cell = load_cell(box.cells + i);
      words[i] = cell.payload;
      if (i == 0) poll.seen = cell.epoch;
      all = all && cell.epoch >= awaited.expected;
    }
    return all;
  });
  memcpy(&message, words, sizeof(Message));
  return came;
}

struct Meeting {
  const IntranodeParams& common;
  ReportLate wait;

  Wanted wanted;
  int slot;  ///< of the mailboxes: see ControlWindow
  std::uint64_t epoch;
  int first_rank = 0;  ///< of the node, in words of a fault record

  DEEP_EP_DEVICE Awaited awaited(int rank) const { return {first_rank + rank, wanted, epoch}; }

  /// By all threads of one block.
  DEEP_EP_DEVICE void announce(const Arrival& ours) const {
    block::each(common.num_ranks,
                [&](int peer) { tell(common.control.arrival(common.heaps[peer], slot, common.rank), ours, epoch); });
  }

  /// Waits until `rank` has come. False after a fault.
  DEEP_EP_DEVICE bool hear(int rank, Arrival& theirs) const {
    return device::hear(wait, common.control.arrival(common.own_heap(), slot, rank), awaited(rank), theirs);
  }

  /// By all threads of a block for which no rank waits: until all have come. What they said is not looked at, as a rank
  /// may be in its next call already. False after a fault that this thread has met.
  DEEP_EP_DEVICE bool await_all() const {
    bool good = true;
    block::each(common.num_ranks, [&](int peer) {
      Arrival theirs;
      good = hear(peer, theirs) && good;
    });
    return good;
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
      good = rows.agrees(wait.context, common.control.arrival(common.own_heap(), slot, common.rank),
                         first_rank + common.rank, awaited(peer));
    });
    return good;
  }
};

}  // namespace deep_ep::device
