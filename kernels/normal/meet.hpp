// How ranks of a node meet at a call: each tells all that it has come, so that its memory is free, and with which rows.
#pragma once

#include <cstring>

#include "kernels/common/row_comparison.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/normal/node.hpp"
#include "kernels/primitives/block.hpp"

namespace deep_ep::device {

struct Meeting {
  const IntranodeParams& common;

  Wanted wanted;
  MeetingKind kind;
  std::uint64_t epoch;
  int first_rank = 0;  ///< of the node, in words of a fault record

  DEEP_EP_DEVICE Awaited awaited(int rank) const { return {first_rank + rank, wanted, epoch}; }
  DEEP_EP_DEVICE const Mailbox& box_of(int rank) const {
    return common.control.mailbox(common.own_heap(), kind, epoch, rank);
  }

  /// By one thread: tells `rank` what this rank has to say. It releases nothing: what the other rank reads has been
  /// written by kernels that have ended, whose writes all see.
  template <class Message>
  DEEP_EP_DEVICE void tell(int rank, const Message& message) const {
    constexpr int kCells = sizeof(Message) / sizeof(std::uint64_t);
    std::uint64_t words[kCells];
    memcpy(words, &message, sizeof(Message));
    Mailbox& box = common.control.mailbox(common.heaps[rank], kind, epoch, common.rank);
#pragma unroll
    for (int i = 0; i < kCells; ++i) store_cell(box.cells + i, words[i], epoch);
  }
  /// By one thread: waits for what `rank` says. False after a fault. Acquires nothing, and need not for what calls
  /// before have read and written: their kernels have ended. What this kernel reads of the other rank's memory needs a
  /// fence behind it.
  template <class Message>
  DEEP_EP_DEVICE bool hear(int rank, Message& message) const {
    constexpr int kCells = sizeof(Message) / sizeof(std::uint64_t);
    static_assert(sizeof(Message) % sizeof(std::uint64_t) == 0 && kCells * sizeof(Cell) <= sizeof(Mailbox));
    const Mailbox& box = box_of(rank);
    std::uint64_t words[kCells] = {};
    const bool came = wait_until(ReportLate{common.wait}, awaited(rank), [&](Poll& poll) {
      bool all = true;
#pragma unroll
      for (int i = 0; i < kCells; ++i) {
        const Cell cell = load_cell(box.cells + i);
        words[i] = cell.payload;
        if (i == 0) poll.seen = cell.epoch;
        all = all && cell.epoch >= epoch;
      }
      return all;
    });
    memcpy(&message, words, sizeof(Message));
    return came;
  }
  /// Ends the call, as `rank` means something else by it: but not before this rank's own message is on its way to all.
  /// It comes from another block, which would not begin any more, and peers would wait for it in vain. `on`: what a
  /// fault record calls it.
  DEEP_EP_DEVICE void report(const Difference& found, int rank, Wanted on) const {
    wait_signal(common.wait, &box_of(common.rank).cells[0].epoch, awaited(common.rank));
    report_fault(common.wait, FaultKind::mismatch, on, first_rank + rank, found.at, found.ours, found.theirs);
  }
  /// Does what `rank` has said agree with ours? Reports it otherwise.
  template <int kWords>
  DEEP_EP_DEVICE bool agrees(const std::int32_t (&ours)[kWords], const std::int32_t (&theirs)[kWords], int rank) const {
    const Difference found = difference(ours, theirs);
    if (found.at >= 0) report(found, rank, wanted);
    return found.at < 0;
  }

  /// By all threads of one block.
  template <class Message>
  DEEP_EP_DEVICE void announce(const Message& ours) const {
    block::each(common.num_ranks, [&](int peer) { tell(peer, ours); });
  }
  /// By all threads of a block: waits until all ranks have come, and compares their rows with ours. False after a fault
  /// that this thread has met.
  DEEP_EP_DEVICE bool hear_all(const Arrival& ours) const {
    bool good = true;
    block::each(common.num_ranks, [&](int peer) {
      Arrival theirs;
      good = good && hear(peer, theirs) && agrees(ours.agreed, theirs.agreed, peer);
    });
    return good;
  }
};

}  // namespace deep_ep::device
