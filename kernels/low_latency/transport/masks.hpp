// Ranks that do not come. A peer that is late is a fault that ends the call. If the buffer masks ranks, the control
// threads of the ranks decide which rank is lost (csrc/control/), and calls go on without it: see ends_late_wait(). No
// wait masks a rank by itself.
//
// Ranks of combine wait for each other in a row: an expert rank for the selections of an owner, the owner for rows of
// the expert rank.
//
//   - A late rank holds up no call of others: a rank tells its selections first to the ranks that are ready, and
//     pushes rows whose selections are late last. So a rank waits only for ranks that it names.
//   - With masking, each rank waits for all others to begin, whether it has to do with them or not: what a masked rank
//     writes when it wakes up must not be summed.
//
// By rails (never with masking) an owner waits for a relay, which waits for the ranks of its node.
#pragma once

#include "kernels/common/wait.hpp"
#include "kernels/low_latency/params.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/rdma/port_channel.hpp"

namespace deep_ep::device::low_latency {

/// True for a rank that is left out: nothing is sent to it, nothing is expected of it.
DEEP_EP_DEVICE bool masked(const LowLatencyParams& common, int peer) {
  return common.mask != nullptr && load_relaxed<Scope::gpu>(common.mask + peer) != 0;
}

/// Tells the control thread of failed queue pairs. Looks at those to each rank in turn, whichever rank is waited for:
/// the poster of an earlier call may have ended before one failed, and the rank at its other end may wait for what is
/// lost while this rank waits for that one, or for another that waits for it.
template <bool kRdma>
struct FailureLook {
  const LowLatencyParams& common;

  DEEP_EP_DEVICE void operator()() const {
    if (!kRdma) return;
    const std::uint32_t looks = fetch_add_relaxed<Scope::gpu>(&common.wait.control->failure_looks, 1u);
    const auto peer = static_cast<int>(looks % static_cast<std::uint32_t>(common.num_ranks));
    if (!Reach<kRdma>{common}.is_far(peer)) return;
#pragma unroll 1
    for (int channel = 0; channel < low_latency_channels(common.lanes); ++channel) {
      const rdma::CompletionEntry& entry = *common.peers[channel * common.num_ranks + peer].queue.completion;
      const std::uint32_t opcode = rdma::tail_opcode(load_acquire<Scope::system>(&entry.tail));
      if (opcode == rdma::kCompletionOk || opcode == rdma::kCompletionNotYetWritten) continue;
      store_release<Scope::system>(common.wait.control->words->failed + peer,
                                   rdma::failure_in(entry, opcode).packed() + 1);
    }
  }
};

/// Without masking no rank tells that it has begun a combine. There `begun` with this bit says that the rank has ended
/// the call, as it disagrees with another rank (refuse_call).
constexpr std::uint64_t kRefused = std::uint64_t{1} << 63;

/// Ends the combine `epoch`, as `peer` means another one or selects what was not dispatched (`field` 1), or as it has
/// ended the call for such a reason. Tells the near ranks, so that they need not find out by their deadlines: of those
/// that wait for this rank, not all wait for that one. First, so that they do not take it for late before.
DEEP_EP_DEVICE_CALL void refuse_call(const LowLatencyParams& common, std::uint64_t epoch, int peer, int field,
                                     std::uint64_t ours, std::uint64_t theirs,
                                     Wanted wanted = Wanted::low_latency_combine_selection) {
#pragma unroll 1
  for (int rank = 0; common.mask == nullptr && rank < common.num_ranks; ++rank) {
    std::byte* heap = common.heaps[rank];
    if (heap == nullptr) continue;  // it is far
    std::uint64_t* word = common.window.begun(LowLatencyKind::combine, common.rank).in(heap);
    store_relaxed<Scope::system>(word, kRefused | epoch);
  }
  report_fault(common.wait, FaultKind::mismatch, wanted, peer, field, ours, theirs);
}

/// The policy of waits, for wait_until() and rdma::Poster. `kRdma` false: no rank is far. `kCombines`: of a combine,
/// which ranks may refuse.
template <bool kRdma, bool kCombines = false>
struct MaskOrEnd {
  const LowLatencyParams& common;
  std::uint64_t epoch = 0;  ///< of the combine

  DEEP_EP_DEVICE bool gives_up(int peer) const { return aborted(common.wait) || masked(common, peer); }
  DEEP_EP_DEVICE bool called_off(const Awaited& awaited) const { return gives_up(awaited.peer); }
  DEEP_EP_DEVICE bool is_late(const Awaited& awaited, std::uint64_t begin) const {
    return may_be_late(begin) && (refused(awaited.peer) || ends_late_wait(common.wait, awaited.peer, awaited.wanted,
                                                                          begin, FailureLook<kRdma>{common}));
  }
  /// Ends the call; or goes on, where the peer is masked now.
  DEEP_EP_DEVICE void blame(const Awaited& awaited, std::uint64_t seen) const {
    if (refused(awaited.peer)) {
      return refuse_call(common, epoch, awaited.peer, 0, 0, 0, Wanted::low_latency_combine_rows);
    }
    if (masked(common, awaited.peer)) return;
    report_fault(common.wait, FaultKind::timeout, awaited.wanted, awaited.peer,
                 common.mask == nullptr ? 0 : kMostTimeouts, awaited.expected, seen);
  }
  /// Ends the call. With masking the control thread knows that the queue pair has failed: its verdict comes.
  DEEP_EP_DEVICE void blame_queue(const RdmaQueuePair& queue) const {
    if (common.mask != nullptr || gives_up(queue.peer)) return;
    const auto failure = static_cast<std::int32_t>(load_relaxed<Scope::gpu>(&queue.state->failure));
    report_fault(common.wait, FaultKind::rdma_failed, Wanted::rdma_completion, queue.peer, failure, 0, 0);
  }

 private:
  /// A rank that has refused an earlier combine sends nothing of this one either.
  DEEP_EP_DEVICE bool refused(int peer) const {
    if (!kCombines) return false;
    const std::uint64_t word =
        load_relaxed<Scope::system>(common.window.begun(LowLatencyKind::combine, peer).in(common.local));
    return (word & kRefused) != 0 && (word & ~kRefused) <= epoch;  // never with masking
  }
};

// Ranks may be masked while a call runs. Then some blocks have received with a rank and others without it, and the last
// block to finish receives again, alone, with those that are left. All that these sent is there: a rank that a block
// waited for in vain is masked.

/// Words of shared memory that a block needs for it.
struct MaskWords {
  std::uint64_t version;     ///< of the masks, as the block saw them when it began
  std::int32_t last, again;  ///< see finish_with_masks
};

/// By one thread, before the block looks at any mask. A block that saw a newer one than this version finds that out at
/// the end.
DEEP_EP_DEVICE void note_masks(const LowLatencyParams& common, MaskWords& words) {
  words.version = common.mask == nullptr ? 0 : load_acquire<Scope::gpu>(&common.wait.control->version);
}

/// By every thread of the blocks that receive, when they have. `words.last`: all others have finished. `words.again`:
/// not all blocks saw the same masks, and this block is to receive again.
DEEP_EP_DEVICE void finish_with_masks(const LowLatencyParams& common, LowLatencyKind kind, MaskWords& words) {
  block::sync();
  if (thread_index() == 0) {
    LowLatencyCounters& counters = common.counters(kind);
    const auto blocks = static_cast<std::uint32_t>(common.working_blocks);
    add_relaxed<Scope::gpu>(&counters.versions, words.version);
    words.last = words.again = 0;
    if (last_to_arrive<Scope::gpu>(&counters.finished, blocks)) {
      const std::uint64_t now = load_acquire<Scope::gpu>(&common.wait.control->version);
      words.last = 1;
      words.again = load_relaxed<Scope::gpu>(&counters.versions) == now * blocks ? 0 : 1;
      words.version = now;
      store_relaxed<Scope::gpu>(&counters.versions, 0);
    }
  }
  block::sync();
}

/// By every thread of the block that has received again. `words.again`: masks have changed since it began to.
DEEP_EP_DEVICE void compare_masks(const LowLatencyParams& common, MaskWords& words) {
  block::sync();
  if (thread_index() == 0) {
    const std::uint64_t now = load_acquire<Scope::gpu>(&common.wait.control->version);
    words.again = words.version == now ? 0 : 1;
    words.version = now;
  }
  block::sync();
}

}  // namespace deep_ep::device::low_latency
