// Ranks that do not come. A peer that is late is a fault that ends the call; or, where the buffer masks ranks, it is
// masked, and the call goes on without it.
//
// Ranks of combine wait for each other in a row: an expert rank for the selections of an owner, the owner for rows of
// the expert rank. When a rank is lost, the others must all blame that one, and nobody who merely waited for it.
//
//   - Nobody is held up by somebody else's lateness: selections are told to those who are ready first, and rows whose
//     selections are late are put off. So a rank waits for nobody but those that it names.
//   - With masking, a rank that has not even begun the call is given the whole deadline, one that has begun it half of
//     that: who finds a rank lost in the middle of a call is late for the next one by half a deadline, and the others
//     bear that.
//   - With masking, each rank waits for all others to begin, whether it has to do with them or not. So all find out at
//     once that a rank has not come. Without it, nobody tells that it has begun, and all deadlines are whole.
//
// Where ranks agree on who is lost (watch.hpp), waits have no deadlines of their own. What is said here about deadlines
// is for ranks that are all near and cannot agree.
//
// By rails (never with masking) an owner waits for a relay, which waits for the ranks of its node: if one of these is
// lost in the middle of a call, the owner may name the relay. So may a receiver of dispatch name a source whose rows a
// relay did not hand on.
#pragma once

#include "kernels/common/wait.hpp"
#include "kernels/low_latency/params.hpp"
#include "kernels/primitives/block.hpp"

namespace deep_ep::device::low_latency {

/// True for a rank that is left out: nothing is sent to it, nothing is expected of it.
DEEP_EP_DEVICE bool masked(const LowLatencyParams& common, int peer) {
  return common.mask != nullptr && load_relaxed<Scope::gpu>(common.mask + peer) != 0;
}

/// What becomes of waits, in the words of wait_until() and rdma::Poster.
struct MaskOrEnd {
  const LowLatencyParams& common;

  DEEP_EP_DEVICE bool gives_up(int peer) const { return aborted(common.wait) || masked(common, peer); }
  DEEP_EP_DEVICE bool called_off(const Awaited& awaited) const { return gives_up(awaited.peer); }
  DEEP_EP_DEVICE bool is_late(const Awaited& awaited, std::uint64_t begin) const {
    return ReportLate{common.wait}.is_late(awaited, begin);
  }
  /// Masks a rank that is late, or ends the call.
  DEEP_EP_DEVICE void blame(const Awaited& awaited, std::uint64_t seen) const {
    if (common.mask != nullptr) {
      mask_rank(awaited, seen);
    } else {
      report_fault(common.wait, FaultKind::timeout, awaited.wanted, awaited.peer, 0, awaited.expected, seen);
    }
  }
  /// Masks the rank of a queue pair that has failed, or ends the call.
  DEEP_EP_DEVICE void blame_queue(const RdmaQueuePair& queue) const {
    if (gives_up(queue.peer)) return;
    const auto failure = static_cast<std::int32_t>(load_relaxed<Scope::gpu>(&queue.state->failure));
    constexpr Wanted kWanted = Wanted::rdma_completion;
    if (common.mask == nullptr) {
      report_fault(common.wait, FaultKind::rdma_failed, kWanted, queue.peer, failure, 0, 0);
    } else {
      // Nothing new where the failed wait has filled the record.
      write_record(common.masked[queue.peer], FaultKind::rdma_failed, kWanted, queue.peer, failure, 0, 0);
      mask_rank({queue.peer, kWanted, 0}, 0);
    }
  }

  /// Leaves a rank out from now on, and tells the host (`who`: FaultRecord::field). The version moves on both before
  /// and after: whoever begins in between has seen an old one, and whoever has seen the mask finds a new one.
  DEEP_EP_DEVICE void mask_rank(const Awaited& awaited, std::uint64_t seen, int who = 0) const {
    write_record(common.masked[awaited.peer], FaultKind::timeout, awaited.wanted, awaited.peer, who, awaited.expected,
                 seen);
    add_relaxed<Scope::gpu>(&common.state->mask_version, std::uint64_t{1});
    store_release<Scope::gpu>(common.mask + awaited.peer, 1);
    add_release<Scope::gpu>(&common.state->mask_version, std::uint64_t{1});
  }
};

/// Where ranks are not masked, nobody tells that it has begun a combine. Then `begun` says something else, with this
/// bit: that the rank has ended the call, as it disagrees with somebody (refuse_call).
constexpr std::uint64_t kRefused = std::uint64_t{1} << 63;

/// The same with the deadlines of combine.
struct MaskOrEndCombine : MaskOrEnd {
  std::uint64_t epoch;

  DEEP_EP_DEVICE MaskOrEndCombine(const LowLatencyParams& params, std::uint64_t call)
      : MaskOrEnd{params}, epoch(call) {}

  DEEP_EP_DEVICE bool is_late(const Awaited& awaited, std::uint64_t begin) const {
    if (refused(awaited.peer) || ends_for_lost(common.wait, awaited.peer, begin)) return true;
    const std::uint64_t deadline = common.wait.timeout_ns;
    if (deadline == 0) return false;
    const std::uint64_t waited = now_ns() - begin;
    return waited > deadline || (waited > deadline / 2 && has_begun(awaited.peer));
  }
  DEEP_EP_DEVICE void blame(const Awaited& awaited, std::uint64_t seen) const {
    if (!refused(awaited.peer)) return MaskOrEnd::blame(awaited, seen);
    report_fault(common.wait, FaultKind::mismatch, Wanted::low_latency_combine_rows, awaited.peer, 0, 0, 0);
  }

 private:
  DEEP_EP_DEVICE bool refused(int peer) const {
    return common.mask == nullptr &&
           load_relaxed<Scope::system>(common.window.begun(LowLatencyKind::combine, peer).in(common.local)) ==
               (kRefused | epoch);
  }
  /// Has `peer` begun the send part of the call? Told with masking only.
  DEEP_EP_DEVICE bool has_begun(int peer) const {
    return common.mask != nullptr &&
           load_relaxed<Scope::system>(common.window.begun(LowLatencyKind::combine, peer).in(common.local)) >= epoch;
  }
};

// Ranks may be masked while a call runs, by the waits of this very call. Then some blocks have received with a rank and
// others without it, and the last block to finish receives again, alone, with those that are left. What they sent is
// all there: whoever a block waited for in vain is masked.

/// Words of shared memory that a block needs for it.
struct MaskWords {
  std::uint64_t version;     ///< of the masks, as the block saw them when it began
  std::int32_t last, again;  ///< see finish_with_masks
};

/// By one thread, before the block looks at any mask. Who saw a newer one than this version finds that out at the end.
DEEP_EP_DEVICE void note_masks(const LowLatencyParams& common, MaskWords& words) {
  words.version = common.mask == nullptr ? 0 : load_acquire<Scope::gpu>(&common.state->mask_version);
}

/// By every thread of the blocks that receive, when they have. `words.last`: all others have finished. `words.again`:
/// not everybody saw the same masks, and this block is to receive again.
DEEP_EP_DEVICE void finish_with_masks(const LowLatencyParams& common, LowLatencyKind kind, MaskWords& words) {
  block::sync();
  if (thread_index() == 0) {
    LowLatencyCounters& counters = common.counters(kind);
    const auto blocks = static_cast<std::uint32_t>(common.working_blocks);
    add_relaxed<Scope::gpu>(&counters.versions, words.version);
    words.last = words.again = 0;
    if (last_to_arrive<Scope::gpu>(&counters.finished, blocks)) {
      const std::uint64_t now = load_acquire<Scope::gpu>(&common.state->mask_version);
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
    const std::uint64_t now = load_acquire<Scope::gpu>(&common.state->mask_version);
    words.again = words.version == now ? 0 : 1;
    words.version = now;
  }
  block::sync();
}

}  // namespace deep_ep::device::low_latency
