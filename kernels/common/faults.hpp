// Faults: what kernels put on record, in memory that the host sees, when a call cannot go on as it should.
#pragma once

#include <cstdint>

#include "kernels/common/control_words.hpp"
#include "kernels/common/limits.hpp"
#include "kernels/primitives/memory.hpp"

namespace deep_ep {

/// Each thing that a wait may be for, and its words: a rank waits for the peer "without seeing ...".
#define DEEP_EP_WANTED(X)                                                                                   \
  X(nothing, "nothing")                                                                                     \
  X(counts, "its token counts (dispatch, notify kernel)")                                                   \
  X(dispatch_addresses, "where it wants its rows (dispatch kernel)")                                        \
  X(dispatch_rows, "its rows (dispatch kernel)")                                                            \
  X(dispatch_credit, "room in its window (dispatch kernel)")                                                \
  X(combine_addresses, "where its rows are (combine kernel)")                                               \
  X(combine_rows, "a pushed row (combine kernel)")                                                          \
  X(combine_credit, "room in its window (combine kernel)")                                                  \
  X(combine_done, "its confirmation that it has read our rows (combine kernel)")                            \
  X(barrier, "its arrival at the barrier (barrier kernel)")                                                 \
  X(load_balance_call, "its arrival at the call (prefetch_weights or reduce_grads)")                        \
  X(load_balance_done, "its end of the call (prefetch_weights or reduce_grads)")                            \
  X(low_latency_dispatch_credit, "its confirmation of the dispatch before the last (low-latency dispatch)") \
  X(low_latency_dispatch_counts, "its counts (low-latency dispatch)")                                       \
  X(low_latency_dispatch_rows, "a row (low-latency dispatch)")                                              \
  X(low_latency_combine_credit, "its confirmation of the combine before the last (low-latency combine)")    \
  X(low_latency_combine_selection, "the selections of a token (low-latency combine)")                       \
  X(low_latency_combine_rows, "a row (low-latency combine)")                                                \
  X(low_latency_combine_signal, "a signal for rows of x (low-latency combine)")                             \
  X(low_latency_barrier, "its arrival at the barrier (low_latency_clean)")                                  \
  X(internode_rows, "its rows over the network (dispatch or combine between nodes)")                        \
  X(internode_credit, "room in its landing ring (dispatch or combine between nodes)")                       \
  X(rdma_completion, "the NIC's report that our RDMA operations have reached it")
enum class Wanted : std::uint32_t {
#define DEEP_EP_NAME(name, text) name,
  DEEP_EP_WANTED(DEEP_EP_NAME)
#undef DEEP_EP_NAME
};

enum class FaultKind : std::uint32_t { none, timeout, mismatch, overflow, rdma_failed };

/// Written by the first thread that meets a fault, in memory that the host sees. A rank has two, side by side: for
/// faults that end calls, and for notes, which the call survives.
struct FaultRecord {
  std::uint64_t claimed;  ///< 0: no fault. Set first, so that only one thread writes the rest
  std::uint64_t written;  ///< set last, with release order
  FaultKind kind;
  Wanted wanted;
  std::int32_t peer;       ///< the rank waited for, or the one that disagrees
  std::int32_t field;      ///< mismatch: which word of the CallShape, or of `agreed`, in combine of low latency as it
                           ///< calls refuse(); timeout: how many time-outs it waited, 0 is one, or which signal of x;
                           ///< overflow in low latency: the local expert; rdma_failed: an RdmaFailure
  std::uint64_t expected;  ///< timeout: signal value, for a signal of x the expert above it; mismatch: ours; overflow:
                           ///< rows that came, in low latency one more than there is room for; rdma_failed: index
                           ///< of the work-queue entry, if `seen` is not 0
  std::uint64_t seen;      ///< timeout: signal value (0 in low-latency calls but of a signal of x); mismatch: theirs;
                           ///< overflow: rows that there is room for; rdma_failed: entries posted so far
};

/// Why a rank is left out: parts of its mask, which add up. Several threads may each add the verdict.
constexpr std::uint64_t kMaskedByProgram = 1;
constexpr std::uint64_t kMaskedByVerdict = 2;

/// The part of the control plane that threads of a rank share, in device memory: loads of host memory take a GPU long.
struct ControlState {
  ControlWords* words;
  std::int32_t rank, num_ranks;
  std::int32_t masking;              ///< 1: calls go on without lost ranks, 0: waits for these end the call
  std::uint32_t seen;                ///< the value of `changes` that kernels have acted upon
  std::uint32_t failure_looks;       ///< how often waits have looked for failed queue pairs
  std::uint64_t version;             ///< with masking: moves with each rank that is lost
  std::uint64_t step_ns;             ///< the most that counts of the time between two looks
  std::uint64_t looked[kMaxRanks];   ///< when a wait for this peer has last looked and reported, in now_ns()
  std::uint64_t counted[kMaxRanks];  ///< how long waits for this peer have lasted, one over the other
  std::uint64_t mask[kMaxRanks];     ///< see above
  std::uint32_t left[kMaxRanks];     ///< 1: the peer has left; see is_late_wait()
};

/// What a thread that waits needs to know; see wait.hpp. `abort` is a word in this rank's device memory: non-zero once
/// any wait of this rank has failed, so that the others give up, too.
struct WaitContext {
  FaultRecord* fault = nullptr;  ///< [2]: the fault, the note
  std::uint64_t* abort = nullptr;
  std::uint64_t timeout_ns = 0;     ///< 0: for ever. With a control plane the verdict should come before
  ControlState* control = nullptr;  ///< null: there is no control plane
  bool spares_call = false;         ///< the caller of the wait deals with its faults, which do not end the call
};

namespace device {

DEEP_EP_DEVICE bool aborted(const WaitContext& context) { return load_relaxed<Scope::gpu>(context.abort) != 0; }

/// Fills a record, unless another thread of this rank was faster. False: one was.
DEEP_EP_DEVICE bool write_record(FaultRecord& record, FaultKind kind, Wanted wanted, int peer, int field,
                                 std::uint64_t expected, std::uint64_t seen) {
  if (fetch_add_acq_rel<Scope::gpu>(&record.claimed, std::uint64_t{1}) != 0) return false;
  record.kind = kind;
  record.wanted = wanted;
  record.peer = peer;
  record.field = field;
  record.expected = expected;
  record.seen = seen;
  store_release<Scope::system>(&record.written, std::uint64_t{1});
  return true;
}

// What follows seldom runs. Kernels call it, so that their loops stay short and keep their registers: hence numbers and
// no structs.

/// Tells the control thread that this rank has ended its calls, so others wait for it in vain, and because of which
/// rank: the one that it has waited for, the one at the other end of a queue pair, or itself. (Faults that all ranks
/// find in their counts end one call alone.)
DEEP_EP_DEVICE void tell_end(const ControlState& control, FaultKind kind, Wanted wanted, int peer) {
  if (kind == FaultKind::mismatch && wanted == Wanted::counts) return;
  const bool by_peer = kind == FaultKind::timeout || kind == FaultKind::rdma_failed;
  store_release<Scope::system>(&control.words->ended, static_cast<std::uint32_t>(by_peer ? peer : control.rank) + 1);
}

/// report_fault(), inlined.
DEEP_EP_DEVICE void report_fault_here(const WaitContext& context, FaultKind kind, Wanted wanted, int peer, int field,
                                      std::uint64_t expected, std::uint64_t seen) {
  const bool controlled = context.control != nullptr;
  if (controlled && kind == FaultKind::rdma_failed) {
    store_release<Scope::system>(context.control->words->failed + peer, static_cast<std::uint32_t>(field) + 1);
  }
  if (context.spares_call) return;
  const bool first = write_record(context.fault[0], kind, wanted, peer, field, expected, seen);
  if (first && controlled) tell_end(*context.control, kind, wanted, peer);
  store_release<Scope::gpu>(context.abort, std::uint64_t{1});
}
/// Puts a fault on record and makes every wait of this rank give up.
DEEP_EP_DEVICE_CALL void report_fault(const WaitContext& context, FaultKind kind, Wanted wanted, int peer, int field,
                                      std::uint64_t expected, std::uint64_t seen) {
  report_fault_here(context, kind, wanted, peer, field, expected, seen);
}

/// Does nothing come from `peer` any more, as far as kernels of this rank have heard?
DEEP_EP_DEVICE bool is_lost(const ControlState& control, int peer) {
  return load_relaxed<Scope::gpu>(control.mask + peer) >= kMaskedByVerdict;
}

/// The version moves both before and after a mask: a block that begins in between has seen an old one, and a block that
/// has seen the mask finds a new one.
DEEP_EP_DEVICE void mask_by_verdict(ControlState& control, int rank) {
  add_relaxed<Scope::gpu>(&control.version, std::uint64_t{1});
  add_release<Scope::gpu>(control.mask + rank, kMaskedByVerdict);
  add_release<Scope::gpu>(&control.version, std::uint64_t{1});
}

/// Acts upon the verdicts and goodbyes that have arrived, by one thread.
DEEP_EP_DEVICE void take_verdict(const WaitContext& context) {
  ControlState& control = *context.control;
  const std::uint32_t changes = load_acquire<Scope::system>(&control.words->changes);
  if (changes == load_relaxed<Scope::gpu>(&control.seen)) return;
  bool given_up = false;
#pragma unroll 1
  for (int rank = 0; rank < control.num_ranks; ++rank) {
    if (load_relaxed<Scope::system>(control.words->left + rank) != 0)
      store_release<Scope::gpu>(control.left + rank, 1u);
    if (load_relaxed<Scope::system>(control.words->lost + rank) == 0 || is_lost(control, rank)) continue;
    if (rank == control.rank) {
      given_up = control.masking != 0;
      if (given_up) store_release<Scope::gpu>(context.abort, std::uint64_t{1});  // the host knows why
      continue;
    }
    mask_by_verdict(control, rank);
  }
  if (!given_up) store_relaxed<Scope::gpu>(&control.seen, changes);  // kernels of other contexts must hear of it, too
}

/// Reports a wait to the control thread, and hears of verdicts. By one thread for all that wait for this peer, as loads
/// of host memory by all of them would hold up what they wait for. Returns how long the wait has lasted. Of the time
/// between two looks no more than a step counts: a rank that has stood still must not accuse those that went on.
DEEP_EP_DEVICE std::uint64_t report_wait(const WaitContext& context, int peer, Wanted wanted, std::uint64_t begin,
                                         std::uint64_t looked, std::uint64_t now) {
  ControlState& control = *context.control;
  std::uint64_t counted = looked > begin ? load_relaxed<Scope::gpu>(control.counted + peer) : 0;
  const std::uint64_t passed = now - (looked > begin ? looked : begin);
  counted += passed < control.step_ns ? passed : control.step_ns;
  store_relaxed<Scope::gpu>(control.counted + peer, counted);
  const std::uint64_t waited = counted < now - begin ? counted : now - begin;
  if (peer != control.rank) {
    ControlWords& words = *control.words;
    store_relaxed<Scope::system>(words.wanted + peer, static_cast<std::uint32_t>(wanted));
    store_relaxed<Scope::system>(words.waits + peer, waited);
    store_release<Scope::system>(words.beats + peer, static_cast<std::uint32_t>(now >> 10));
  }
  take_verdict(context);
  return waited;
}

/// Has a wait that began at `begin` lasted longer than calls do? Only then do kernels ask whether it is late.
DEEP_EP_DEVICE bool may_be_late(std::uint64_t begin) {
  constexpr std::uint64_t kAfterNs = 5'000'000;
  return now_ns() - begin >= kAfterNs;
}

/// What becomes of a wait. look_again: its peer has left, so the next look decides.
enum class Lateness : int { none, look_again, late };

/// The last bits of the time at which a wait began: 1 + the peer that its last look has found to have left, or 0.
constexpr std::uint64_t kLeftPeerBits = 2047;
static_assert(kMaxRanks < kLeftPeerBits);

/// Decides whether a wait for `peer` that began at `begin` ends, as nothing arrives from the peer any more, or as it
/// has lasted for too long. With a control plane one of the waiting threads reports the wait now and then, and calls
/// `when_reporting()`.
///
/// A peer that has left has made all of its calls completely. The order of what it sent for them and its goodbye:
///   1. its kernels store rows and signals here, with release order at system scope, and end; its NIC has completed;
///   2. its host, which has waited for that, sends the goodbye, which this rank's control thread receives;
///   3. the control thread stores ControlWords::left, and releases ControlWords::changes at system scope;
///   4. take_verdict() acquires that, and releases ControlState::left, which is acquired here.
/// So a look behind this one sees all that the peer has ever sent. A wait that has everything by then ends well; only
/// the second look that finds nothing belongs to a call that the peer never made.
template <class WhenReporting>
DEEP_EP_DEVICE Lateness is_late_wait(const WaitContext& context, int peer, Wanted wanted, std::uint64_t begin,
                                     WhenReporting when_reporting) {
  constexpr std::uint64_t kBetweenNs = 1'000'000;
  const std::uint64_t now = now_ns();
  if (context.control == nullptr) {
    return context.timeout_ns != 0 && now - begin > context.timeout_ns ? Lateness::late : Lateness::none;
  }
  std::uint64_t* word = context.control->looked + peer;
  const std::uint64_t looked = load_relaxed<Scope::gpu>(word);
  if (now > looked + kBetweenNs && compare_exchange<Scope::gpu>(word, looked, now) == looked) {
    when_reporting();
    const std::uint64_t waited = report_wait(context, peer, wanted, begin, looked, now);
    if (context.timeout_ns != 0 && waited > context.timeout_ns) return Lateness::late;
  }
  if (is_lost(*context.control, peer)) return Lateness::late;
  // A peer that leaves keeps its memory until all have come to the end: this rank's NIC still completes.
  if (wanted == Wanted::rdma_completion) return Lateness::none;
  if (load_acquire<Scope::gpu>(context.control->left + peer) == 0) return Lateness::none;
  if ((begin & kLeftPeerBits) != static_cast<std::uint64_t>(peer) + 1) return Lateness::look_again;
  if (context.control->masking != 0) mask_by_verdict(*context.control, peer);  // calls go on without it
  return Lateness::late;
}
/// Puts a late wait on record as a fault. Calls no function: with one in it, combine of normal mode took 8 % longer on
/// 8 SMs.
DEEP_EP_DEVICE_CALL Lateness end_late_wait(const WaitContext& context, int peer, Wanted wanted, std::uint64_t expected,
                                           std::uint64_t begin, std::uint64_t seen) {
  const Lateness found = is_late_wait(context, peer, wanted, begin, [] {});
  if (found == Lateness::late) report_fault_here(context, FaultKind::timeout, wanted, peer, 0, expected, seen);
  return found;
}

}  // namespace device
}  // namespace deep_ep
