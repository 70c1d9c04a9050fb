// What kernels use to reach a peer's heap through a NIC: put bytes, add to signals.
//
// Order. Everything posted to one RdmaPeer is executed in the order of posting, and an addition becomes visible at the
// peer only after the bytes of all puts before it: a thread of the peer that acquires the sum (wait_signal) sees them.
// Puts alone are not ordered for somebody who polls their last byte. Different queue pairs are not ordered at all: a
// signal speaks for the puts of its own queue pair.
//
// Nothing is sent before the batch is full or flush() (or quiet(), close()) is called; a signal that a peer waits for
// needs a flush behind it. Local bytes must stay unchanged until quiet() or wait_for() says that they were sent.
#pragma once

#include "kernels/common/place.hpp"
#include "kernels/rdma/send_queue.hpp"

namespace deep_ep::device::rdma {

/// Group is OneThread or WholeWarp. In a warp all lanes make every call; lanes whose `wanted` is false post nothing,
/// and the others post in the order of the lanes. Offsets are in bytes from the beginning of the heaps. False: see
/// SendQueue.
template <class Group>
class RdmaPeer {
 public:
  /// Both stay where they are: see SendQueue.
  DEEP_EP_DEVICE RdmaPeer(const RdmaPeerParams& params, const WaitContext& wait)
      : params_(params), queue_(params.queue, wait) {}

  /// Copies `bytes` (0 to 2^30) of this rank's heap into the peer's.
  DEEP_EP_DEVICE bool put(std::uint64_t remote_offset, std::uint64_t local_offset, std::uint32_t bytes,
                          bool wanted = true) {
    return queue_.post(wanted, [&](WorkQueueEntry& entry, const EntryHeader& header) {
      write_entry(entry, header, {remote_offset, params_.remote_key}, {local_offset, params_.local_key}, bytes);
    });
  }

  /// Writes a value of 1 to 28 bytes into the peer's heap; it is taken over at once.
  template <class T>
  DEEP_EP_DEVICE bool put_value(std::uint64_t remote_offset, const T& value, bool wanted = true) {
    return queue_.post(wanted, [&](WorkQueueEntry& entry, const EntryHeader& header) {
      write_inline_entry(entry, header, {remote_offset, params_.remote_key}, value);
    });
  }

  /// Adds to an 8-byte word of the peer's heap (offset a multiple of 8), atomically among RDMA additions.
  DEEP_EP_DEVICE bool signal_add(std::uint64_t remote_offset, std::uint64_t add, bool wanted = true) {
    return queue_.post(wanted, [&](WorkQueueEntry& entry, const EntryHeader& header) {
      fetch_add_entry(entry, header, {remote_offset, params_.signal_key}, params_.queue.sink, add);
    });
  }

  /// Makes a word of the peer's heap `value`. `sent`: in memory of this rank, what the word will be once all that was
  /// posted has arrived. By OneThread.
  DEEP_EP_DEVICE bool raise(Place<std::uint64_t> word, std::uint64_t& sent, std::uint64_t value) {
    if (!signal_add(word.offset, value - sent)) return false;
    sent = value;
    return true;
  }

  /// Sends what was posted so far.
  DEEP_EP_DEVICE void flush() { queue_.ring(); }

  /// Number of what was posted so far; wait_for() it later to reuse the local bytes of that much.
  DEEP_EP_DEVICE std::uint64_t posted() const { return queue_.written(); }
  DEEP_EP_DEVICE bool wait_for(std::uint64_t posted) { return queue_.wait_for(posted); }
  /// Has that much happened at the peer? Looks once; true also when the queue pair has failed.
  DEEP_EP_DEVICE bool reached(std::uint64_t posted) { return queue_.reached(posted); }
  /// Waits until everything posted so far has happened at the peer.
  DEEP_EP_DEVICE bool quiet() { return queue_.quiet(); }

  /// Sends, and gives the queue pair back; call it last.
  DEEP_EP_DEVICE bool close() { return queue_.close(); }

 private:
  const RdmaPeerParams& params_;
  SendQueue<Group> queue_;
};

}  // namespace deep_ep::device::rdma
