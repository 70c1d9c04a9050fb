// How kernels reach a peer's heap through a NIC: put bytes, raise signals. Entries are written into the ring of a queue
// pair, rung, and their completions polled; the same code serves every NIC handler.
//
// Order. All that is posted to one channel happens at the peer in the order of posting, and an addition becomes visible
// only after the bytes of all puts before it: a thread of the peer that acquires the sum (wait_signal) sees them. Puts
// alone are not ordered for a thread that polls their last byte. Different channels are not ordered at all: a signal
// speaks for the puts of its own channel.
//
// Nothing is sent before the batch is full or flush() (or quiet(), close()) is called; a signal that a peer waits for
// needs a flush behind it. Local bytes must stay unchanged until quiet() or wait_for() says that they were sent.
//
// A queue pair has one owner at a time, so nothing here is locked: indices live in registers (in every lane the same)
// and return to memory in close(). Room is taken before entries are written, so the ring is never overrun. Doorbells
// are batched, and the last entry of every batch asks for a completion; all entries before it are then complete too.
#pragma once

#include "kernels/common/carver.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep::device::rdma {

/// The failure in a completion entry whose opcode is not that of a success.
DEEP_EP_DEVICE RdmaFailure failure_in(const CompletionEntry& entry, std::uint32_t opcode) {
  if (opcode != kCompletionError) return {0, 0, opcode};
  return {entry.syndrome, entry.vendor_syndrome, swap32(entry.opcode_number) >> 24};
}

/// Group is OneThread or WholeWarp. In a warp all lanes make every call; those whose `wanted` is false post nothing,
/// and the others post in the order of the lanes. Offsets are in bytes from the beginning of the heaps. Functions that
/// return bool return false, in all members, once the queue pair has failed or a wait of this rank has met its
/// deadline; a fault is on record then, and nothing more is posted.
template <class Group>
class PortChannel {
 public:
  /// Takes the queue pair over from its last owner, who called close() in an earlier kernel or before a barrier. `pair`
  /// and `wait` stay where they are: best in shared memory or among the kernel's parameters, as every entry needs them.
  DEEP_EP_DEVICE PortChannel(const RdmaQueuePair& pair, const WaitContext& wait)
      : pair_(pair),
        wait_(wait),
        written_(pair_.state->posted),
        rung_(written_),
        completed_(pair_.state->completed),
        good_(pair_.state->failure == 0) {
    Group::sync();  // all members have read the state, which the leader may write from now on
  }

  /// Copies `bytes` (0 to 2^30) of this rank's heap into the peer's.
  DEEP_EP_DEVICE bool put(std::uint64_t remote_offset, std::uint64_t local_offset, std::uint32_t bytes,
                          bool wanted = true) {
    return post(wanted, [&](WorkQueueEntry& entry, std::uint64_t index) {
      write_entry(entry, index, pair_.number, {remote_offset, pair_.remote_key}, {local_offset, pair_.local_key},
                  bytes);
    });
  }
  /// Adds to an 8-byte word of the peer's heap (offset a multiple of 8), atomically among RDMA additions.
  DEEP_EP_DEVICE bool signal_add(std::uint64_t remote_offset, std::uint64_t add, bool wanted = true) {
    return post(wanted, [&](WorkQueueEntry& entry, std::uint64_t index) {
      fetch_add_entry(entry, index, pair_.number, {remote_offset, pair_.signal_key}, pair_.sink, add);
    });
  }
  /// Makes such a word `value`, unless it is that or more. `sent`: in memory of this rank, what the word will be once
  /// all that was posted has arrived.
  DEEP_EP_DEVICE bool signal(Place<std::uint64_t> word, std::uint64_t& sent, std::uint64_t value) {
    const std::uint64_t before = Group::from_leader(Group::leads() ? sent : value);
    if (before >= value) return true;
    if (!signal_add(word.offset, value - before, Group::leads())) return false;
    if (Group::leads()) sent = value;
    return true;
  }

  /// Writes one entry for each member that wants one, in the order of the members. `write(entry, index)` fills it in.
  template <class Write>
  DEEP_EP_DEVICE bool post(bool wanted, Write&& write) {
    const std::uint32_t votes = Group::vote(wanted);
    const std::uint32_t count = count_bits(votes);
    if (!make_room(count)) return false;
    if (wanted) {
      const std::uint64_t index = written_ + count_bits(votes & Group::members_before());
      write(entry(index), index);
    }
    written_ += count;
    if (written_ - rung_ >= pair_.batch) flush();
    return true;
  }

  /// Hands all entries written so far to the device. What the members wrote before, to the ring and to the memory that
  /// the entries name, is visible to the device; what other threads wrote is too, if a barrier or signal that this
  /// group has passed since made it visible to the group.
  DEEP_EP_DEVICE void flush() {
    if (written_ == rung_ || !good_) return;
    Group::sync();  // all members' entries are written
    rung_ = written_;
    if (!Group::leads()) return;
    signal_entry(entry(rung_ - 1));
    if (pair_.doorbell_record == nullptr) {
      store_release<Scope::system>(pair_.doorbell, rung_);
    } else if (pair_.system_scope) {
      ring_register<Scope::system>();
    } else {
      ring_register<Scope::gpu>();
    }
  }

  /// Entries written so far, since the queue pair was made: a ticket for wait_for().
  DEEP_EP_DEVICE std::uint64_t posted() const { return written_; }

  /// Waits until the entries before `ticket` are complete (flushes them first): their local memory may be overwritten,
  /// and what they did at the peer has happened.
  DEEP_EP_DEVICE bool wait_for(std::uint64_t ticket) {
    if (!good_) return false;
    flush();
    if (completed_ < ticket) {
      if (Group::leads()) {
        const Awaited awaited{pair_.peer, Wanted::rdma_completion, ticket};
        const bool came = wait_until(ReportLate{wait_}, awaited, [&](Poll& look) {
          poll();
          look.seen = completed_;
          return !good_ || completed_ >= ticket;
        });
        good_ = good_ && came;
      }
      learn();
      Group::sync();  // what the leader acquired, the others may read
    }
    return good_;
  }

  /// Are the entries before `ticket`, which have been rung, complete? Looks once. Also true when the queue pair has
  /// failed, which the next call finds.
  DEEP_EP_DEVICE bool reached(std::uint64_t ticket) {
    if (!good_ || completed_ >= ticket) return true;
    if (Group::leads()) poll();
    learn();
    return !good_ || completed_ >= ticket;
  }

  /// Waits until everything written so far is complete.
  DEEP_EP_DEVICE bool quiet() { return wait_for(written_); }

  /// Rings, looks for failures without waiting, and gives the queue pair back.
  DEEP_EP_DEVICE bool close() {
    flush();
    Group::sync();  // no member reads the state any more
    if (Group::leads()) {
      if (good_ && completed_ != rung_) poll();
      pair_.state->posted = rung_;
      pair_.state->completed = completed_;
    }
    learn();
    return good_;
  }

 private:
  /// Waits until `count` entries are writable, if the ring is full.
  DEEP_EP_DEVICE bool make_room(std::uint32_t count) {
    if (!good_) return false;
    if (written_ + count - completed_ <= pair_.depth) return true;
    return wait_for(written_ + count - pair_.depth);
  }
  /// All members learn what the leader has found.
  DEEP_EP_DEVICE void learn() {
    good_ = Group::from_leader(good_);
    completed_ = Group::from_leader(completed_);
  }
  DEEP_EP_DEVICE WorkQueueEntry& entry(std::uint64_t index) const {
    return pair_.ring[static_cast<std::uint32_t>(index) & (pair_.depth - 1)];
  }

  // The record first: a device that lost the doorbell finds the entries there. S reaches the memory of ring and record;
  // the device's own reads are served by this GPU, so for memory of this GPU its scope is enough.
  template <Scope S>
  DEEP_EP_DEVICE void ring_register() {
    store_release<S>(pair_.doorbell_record, record_word(rung_));
    fence<S>();
    store_doorbell(pair_.doorbell, doorbell_word(rung_, pair_.number));
  }

  /// Reads the completion entry once. By the leader only.
  DEEP_EP_DEVICE void poll() {
    const std::uint32_t tail = load_acquire<Scope::system>(&pair_.completion->tail);
    const std::uint32_t opcode = tail_opcode(tail);
    if (opcode == kCompletionNotYetWritten) return;
    // 16 bits say how far behind the last rung entry the completed one is: a queue holds fewer than 2^15.
    const auto behind = static_cast<std::uint32_t>(rung_ - 1 - tail_counter(tail)) & 0xffffu;
    const std::uint64_t completed = rung_ - behind;
    const auto outstanding = static_cast<std::uint32_t>(rung_ - completed_);
    if (opcode == kCompletionOk && behind <= outstanding) {
      completed_ = completed;
      return;
    }
    good_ = false;
    const RdmaFailure failure = failure_in(*pair_.completion, opcode);
    pair_.state->failure = failure.packed();
    report_fault(wait_, FaultKind::rdma_failed, Wanted::rdma_completion, pair_.peer,
                 static_cast<std::int32_t>(failure.packed()), completed - 1, rung_);
  }

  const RdmaQueuePair& pair_;
  const WaitContext& wait_;
  std::uint64_t written_;    ///< entries filled in
  std::uint64_t rung_;       ///< entries handed to the device
  std::uint64_t completed_;  ///< entries known to be complete
  bool good_;
};

}  // namespace deep_ep::device::rdma
