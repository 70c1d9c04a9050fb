// Faults: what kernels put on record, in memory that the host sees, when a call cannot go on as it should.
#pragma once

#include <cstdint>

#include "kernels/common/limits.hpp"
#include "kernels/primitives/memory.hpp"

namespace deep_ep {

/// What a wait was for. The texts are in csrc/buffer/fault_texts.cpp.
enum class Wanted : std::uint32_t {
  nothing,
  counts,                         ///< the peer's token counts (notify)
  dispatch_addresses,             ///< where the peer wants its rows
  dispatch_rows,                  ///< the peer's rows
  dispatch_credit,                ///< room in the peer's window
  combine_addresses,              ///< where the peer's rows are, or its window
  combine_rows,                   ///< a pushed row
  combine_credit,                 ///< room in the peer's window
  combine_done,                   ///< the peer's word that it has read our rows
  barrier,                        ///< its arrival at the barrier
  low_latency_dispatch_credit,    ///< its word that it has received the dispatch before the last
  low_latency_dispatch_counts,    ///< its counts
  low_latency_dispatch_rows,      ///< a row
  low_latency_combine_credit,     ///< its word that it has received the combine before the last
  low_latency_combine_selection,  ///< a token's selections at that call
  low_latency_combine_rows,       ///< a row
  low_latency_barrier,            ///< its arrival at the barrier
  low_latency_look,               ///< of this rank: another kernel's end of its look at who is lost
  internode_rows,                 ///< rows from the rail in another node (normal mode)
  internode_credit,               ///< room in its landing ring
  internode_near_rows,            ///< a row that a rank of this node stores in our near window
  internode_near_room,            ///< room in the near window of a rank of this node
  internode_done,                 ///< the word of a rank of this node that it has ended the call
  rdma_completion,                ///< the NIC's word that our operations have reached the peer
};

enum class FaultKind : std::uint32_t {
  none,
  timeout,
  mismatch,
  overflow,
  inconsistent_counts,
  unknown_expert,
  rdma_failed,
  given_up  ///< the others have masked this rank, and it has found that out
};

/// Written by the first thread that meets a fault; lies in memory that the host sees. A rank has two, side by side: one
/// for faults that end calls, one for notes, which the call survives; neither hides the other.
struct FaultRecord {
  std::uint64_t claimed;  ///< 0: no fault. Set first, so that only one thread writes the rest
  std::uint64_t written;  ///< set last, with release order
  FaultKind kind;
  Wanted wanted;
  std::int32_t peer;       ///< the rank waited for, or the one that disagrees
  std::int32_t field;      ///< mismatch: which word of the CallShape, or which RowField; of a masked rank: 1 + the rank
                           ///< that has accused it, or 0: this one has masked it by itself; timeout: how many
                           ///< time-outs it waited, 0 is one; unknown_expert: the token
  std::uint64_t expected;  ///< timeout: signal value; mismatch: ours; overflow: rows that came;
                           ///< unknown_expert: the index found;
                           ///< rdma_failed: index of the work-queue entry, and `field` an RdmaFailure
  std::uint64_t seen;      ///< timeout: signal value; mismatch: theirs; overflow: rows that there is room for;
                           ///< unknown_expert: how many experts there are
};

/// The words of the control plane to waits (csrc/control/), in memory that host and kernels share. Those of the host
/// only grow; nothing resets them.
struct LostWords {
  std::uint32_t changes;          ///< 0: nobody is lost. Written last, with release order
  std::uint32_t ended;            ///< by kernels: 1 + a lost rank that a wait of this rank has ended for; 0: none has
  std::uint32_t lost[kMaxRanks];  ///< 0, or 1 + the rank whose process has ended: nothing comes of this one any more
};

/// In device memory. Host memory is far from a GPU, so its threads share a look at it.
struct LostRanks {
  LostWords* words;
  std::uint64_t looked;  ///< when a thread has last looked at `changes`, in now_ns(); all ones: a rank is lost
};

/// What a thread that waits needs to know; see wait.hpp. `abort` is a word in this rank's device memory: non-zero once
/// any wait of this rank has failed, so that the others give up, too.
struct WaitContext {
  FaultRecord* fault = nullptr;  ///< [2]: the fault, the note
  std::uint64_t* abort = nullptr;
  std::uint64_t timeout_ns = 0;  ///< 0: for ever
  LostRanks* lost = nullptr;     ///< null: nobody tells who is lost
};

namespace device {

/// True once any wait of this rank has failed.
DEEP_EP_DEVICE bool aborted(const WaitContext& context) { return load_relaxed<Scope::gpu>(context.abort) != 0; }

/// Is a rank lost? For waits that began at `begin`. A wait does not look before it has lasted longer than calls do.
DEEP_EP_DEVICE bool some_lost(const WaitContext& context, std::uint64_t begin) {
  constexpr std::uint64_t kSome = ~std::uint64_t{0};
  constexpr std::uint64_t kLooksAfterNs = 5'000'000;
  constexpr std::uint64_t kBetweenLooksNs = 1'000'000;
  if (context.lost == nullptr) return false;
  const std::uint64_t now = now_ns();
  if (now - begin < kLooksAfterNs) return false;
  const std::uint64_t looked = load_relaxed<Scope::gpu>(&context.lost->looked);
  if (looked == kSome) return true;
  if (now - looked < kBetweenLooksNs) return false;
  // One thread looks: loads of host memory by all that wait would hold up what they wait for.
  if (compare_exchange<Scope::gpu>(&context.lost->looked, looked, now) != looked) return false;
  if (load_acquire<Scope::system>(&context.lost->words->changes) == 0) return false;
  store_relaxed<Scope::gpu>(&context.lost->looked, kSome);
  return true;
}

DEEP_EP_DEVICE bool is_lost(const WaitContext& context, int peer) {
  return load_acquire<Scope::system>(context.lost->words->lost + peer) != 0;
}
/// Does a wait for `peer` that began at `begin` end, as nothing comes of it any more?
DEEP_EP_DEVICE bool ends_for_lost(const WaitContext& context, int peer, std::uint64_t begin) {
  return some_lost(context, begin) && is_lost(context, peer);
}

/// Fills a record, unless another thread of this rank was faster; no other rank writes to it.
DEEP_EP_DEVICE void write_record(FaultRecord& record, FaultKind kind, Wanted wanted, int peer, int field,
                                 std::uint64_t expected, std::uint64_t seen) {
  if (fetch_add_acq_rel<Scope::gpu>(&record.claimed, std::uint64_t{1}) != 0) return;
  record.kind = kind;
  record.wanted = wanted;
  record.peer = peer;
  record.field = field;
  record.expected = expected;
  record.seen = seen;
  store_release<Scope::system>(&record.written, std::uint64_t{1});
}

/// Puts a note on record (the first one counts); the call goes on, and a later one reports it.
DEEP_EP_DEVICE void note_fault(const WaitContext& context, FaultKind kind, Wanted wanted, int peer, int field,
                               std::uint64_t expected, std::uint64_t seen) {
  write_record(context.fault[1], kind, wanted, peer, field, expected, seen);
}

/// Puts a fault on record and makes every wait of this rank give up. Those who wait for this rank hear it where it has
/// waited for one that is lost.
DEEP_EP_DEVICE void report_fault(const WaitContext& context, FaultKind kind, Wanted wanted, int peer, int field,
                                 std::uint64_t expected, std::uint64_t seen) {
  write_record(context.fault[0], kind, wanted, peer, field, expected, seen);
  if (kind == FaultKind::timeout && context.lost != nullptr && is_lost(context, peer)) {
    store_release<Scope::system>(&context.lost->words->ended, static_cast<std::uint32_t>(peer) + 1);
  }
  store_release<Scope::gpu>(context.abort, std::uint64_t{1});
}

}  // namespace device
}  // namespace deep_ep
