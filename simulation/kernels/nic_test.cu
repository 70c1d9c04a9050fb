// Proves on a machine what its NIC has to do for this library. The senders' entries go through the send queue that all
// kernels use; what arrives is looked at by receivers, on this machine or on the other one.
#include "simulation/kernels/nic_test.hpp"

#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/warp.hpp"
#include "kernels/rdma/port_channel.hpp"

namespace deep_ep::device::nic_test {

namespace layout = deep_ep::nic_test;
using rdma::EntryHeader;
using rdma::KeyedAddress;
using rdma::WorkQueueEntry;

/// A warp, its queue pair and its pair's memory.
class Side {
 public:
  DEEP_EP_DEVICE explicit Side(const NicTestParams& params)
      : params_(params),
        peer_(params.queues[warp_index()]),
        base_(static_cast<std::uint64_t>(warp_index() / 2) * layout::kPairBytes),
        wait_(warp_index() % 2 == 0 ? params.senders_wait : params.receivers_wait),
        queue_(peer_, wait_) {}

  DEEP_EP_DEVICE rdma::PortChannel<WholeWarp>& queue() { return queue_; }
  DEEP_EP_DEVICE NicTestResult& result() const { return params_.results[warp_index()]; }
  DEEP_EP_DEVICE KeyedAddress local(std::uint64_t at) const { return {base_ + at, peer_.local_key}; }
  DEEP_EP_DEVICE KeyedAddress remote(std::uint64_t at) const { return {base_ + at, peer_.remote_key}; }
  DEEP_EP_DEVICE std::uint32_t* words(std::uint64_t at) const {
    return reinterpret_cast<std::uint32_t*>(params_.heap + base_ + at);
  }
  DEEP_EP_DEVICE const std::uint64_t* counter(std::uint64_t at) const {
    return reinterpret_cast<const std::uint64_t*>(params_.heap + base_ + at);
  }

  DEEP_EP_DEVICE void add_entry(WorkQueueEntry& entry, const EntryHeader& header, std::uint64_t at,
                                std::uint64_t add) const {
    fetch_add_entry(entry, header, {base_ + at, peer_.signal_key}, peer_.queue.sink, add);
  }
  /// Adds to a word of the other side, and rings.
  DEEP_EP_DEVICE bool add(std::uint64_t at, std::uint64_t value) {
    const bool good = queue_.post(lane_index() == 0, [&](WorkQueueEntry& entry, const EntryHeader& header) {
      add_entry(entry, header, at, value);
    });
    queue_.flush();
    return good;
  }
  /// Waits for a word that the other side adds to; all lanes acquire.
  DEEP_EP_DEVICE bool wait(std::uint64_t at, std::uint64_t value) const {
    return wait_signal<WholeWarp>(wait_, counter(at), {warp_index(), Wanted::nothing, value});
  }
  DEEP_EP_DEVICE bool stopped() const {
    return WholeWarp::any(load_acquire<Scope::system>(counter(layout::kSignal)) >= layout::kStop);
  }

  /// By any lane: compares what came with what was sent.
  DEEP_EP_DEVICE void compare(std::uint64_t round, int place, std::uint64_t expected, std::uint64_t found) const {
    NicTestResult& mine = result();
    if (found == expected || fetch_add_relaxed<Scope::gpu>(&mine.wrong, std::uint64_t{1}) != 0) return;
    mine.round = round;
    mine.place = static_cast<std::uint64_t>(place);
    mine.expected = expected;
    mine.found = found;
  }

 private:
  const NicTestParams& params_;
  const RdmaPeerParams& peer_;
  std::uint64_t base_;
  const WaitContext& wait_;
  rdma::PortChannel<WholeWarp> queue_;
};

/// Time and operations of a sender, equal in all lanes.
class Work {
 public:
  DEEP_EP_DEVICE explicit Work(const NicTestParams& params) : params_(params), begin_(now()) {}

  DEEP_EP_DEVICE void count(std::uint64_t operations, std::uint64_t bytes) {
    operations_ += operations;
    bytes_ += bytes;
  }
  DEEP_EP_DEVICE std::uint64_t operations() const { return operations_; }
  DEEP_EP_DEVICE bool enough() const {
    return operations_ >= params_.operations || now() - begin_ >= params_.budget_ns;
  }
  DEEP_EP_DEVICE void report(NicTestResult& result) const {
    const std::uint64_t took = now() - begin_;
    if (lane_index() != 0) return;
    result.operations = operations_;
    result.bytes = bytes_;
    result.nanoseconds = took;
  }

 private:
  DEEP_EP_DEVICE static std::uint64_t now() { return warp::shuffle(now_ns(), 0); }

  const NicTestParams& params_;
  std::uint64_t begin_;
  std::uint64_t operations_ = 0;
  std::uint64_t bytes_ = 0;
};

// ---- Rounds of writes ----

/// Entries: writes and additions in turn, complete before the signal goes: only the data is looked at, not its order.
/// Litmus: longer writes, and the signal right behind them.
struct Round {
  bool litmus;
  int writes, words;  ///< of each

  DEEP_EP_DEVICE explicit Round(const NicTestParams& params)
      : litmus(params.task == NicTestTask::litmus),
        writes(litmus ? kWarpSize : layout::kSlots),
        words((litmus ? layout::kLitmusWords : layout::kSlots * layout::kSlotWords) / writes) {}
};

DEEP_EP_DEVICE std::uint64_t counter_of(int slot) { return layout::kCounters + 8 * static_cast<std::uint64_t>(slot); }

DEEP_EP_DEVICE void send_rounds(const NicTestParams& params, Side& side) {
  const Round shape(params);
  bool good = true;
  if (!shape.litmus) {
    // One write alone: of several that fail, the last one's completion is seen, which says only that it was flushed.
    good = side.queue().post(lane_index() == 0, [&](WorkQueueEntry& entry, const EntryHeader& header) {
      write_entry(entry, header, side.remote(layout::kIncoming), side.local(layout::kOutgoing), 64);
    });
    good = good && side.queue().quiet();
  }
  Work work(params);
  for (std::uint64_t round = 1; good && !work.enough(); ++round) {
    std::uint32_t* words = side.words(layout::kOutgoingSlots);
    for (int i = lane_index(); i < shape.writes * shape.words; i += kWarpSize) words[i] = layout::word_of(round, i);
    warp::sync();  // what a lane sends was written by all of them
    const std::uint32_t bytes = 4 * static_cast<std::uint32_t>(shape.words);
    for (int slot = lane_index(); slot < shape.writes; slot += kWarpSize) {
      const std::uint64_t at = std::uint64_t{bytes} * static_cast<std::uint64_t>(slot);
      good = good && side.queue().post(true, [&](WorkQueueEntry& entry, const EntryHeader& header) {
        write_entry(entry, header, side.remote(layout::kIncomingSlots + at), side.local(layout::kOutgoingSlots + at),
                    bytes);
      });
      if (shape.litmus) continue;
      good = good && side.queue().post(true, [&](WorkQueueEntry& entry, const EntryHeader& header) {
        side.add_entry(entry, header, counter_of(slot), static_cast<std::uint64_t>(slot + 1));
      });
    }
    good = good && (shape.litmus || side.queue().quiet());
    good = good && side.add(layout::kSignal, 1) && side.wait(layout::kAnswer, round);
    if (good) work.count(shape.litmus ? 1 : 2 * layout::kSlots + 1, 0);
  }
  work.report(side.result());
  if (good) side.add(layout::kSignal, layout::kStop);
}

DEEP_EP_DEVICE void check_round(const Round& shape, const Side& side, std::uint64_t round) {
  const std::uint32_t* words = side.words(layout::kIncomingSlots);
  for (int i = shape.writes * shape.words - 1 - lane_index(); i >= 0; i -= kWarpSize) {  // what was sent last first
    side.compare(round, i / shape.words, layout::word_of(round, i), load_weak(words + i));
  }
  for (int slot = lane_index(); !shape.litmus && slot < shape.writes; slot += kWarpSize) {
    side.compare(round, layout::kSlots + slot, round * static_cast<std::uint64_t>(slot + 1),
                 load_acquire<Scope::system>(side.counter(counter_of(slot))));
  }
}

/// Looks at every round of the sender, and answers.
DEEP_EP_DEVICE void receive_rounds(const NicTestParams& params, Side& side) {
  const Round shape(params);
  for (std::uint64_t round = 1; side.wait(layout::kSignal, round) && !side.stopped(); ++round) {
    check_round(shape, side, round);
    if (!side.add(layout::kAnswer, 1)) break;
  }
}

// ---- As fast as it goes ----

DEEP_EP_DEVICE void send_stream(const NicTestParams& params, Side& side) {
  const bool writes = params.task == NicTestTask::writes;
  Work work(params);
  std::uint64_t before = 0;  // tickets of the last two batches: no more is under way
  bool good = true;
  while (good && !work.enough()) {
    const std::uint64_t ticket = side.queue().posted();
    const auto message = static_cast<std::uint32_t>(lane_index() % layout::kMessages);
    const std::uint64_t at = std::uint64_t{message} * layout::kMessageBytes;
    good = side.queue().post(true, [&](WorkQueueEntry& entry, const EntryHeader& header) {
      if (!writes) return side.add_entry(entry, header, layout::kCounters, 1);
      write_entry(entry, header, side.remote(layout::kIncoming + at), side.local(layout::kOutgoing + at),
                  layout::kMessageBytes);
    });
    side.queue().flush();
    good = good && side.queue().wait_for(before);
    before = ticket;
    work.count(kWarpSize, writes ? kWarpSize * std::uint64_t{layout::kMessageBytes} : 8 * kWarpSize);
  }
  good = good && side.queue().quiet();
  work.report(side.result());
  good = good && side.queue().post(lane_index() == 0, [&](WorkQueueEntry& entry, const EntryHeader& header) {
    side.add_entry(entry, header, layout::kReport, work.operations());
  });
  if (good) side.add(layout::kSignal, layout::kStop);
}

DEEP_EP_DEVICE void receive_stream(const NicTestParams& params, Side& side) {
  if (!side.wait(layout::kSignal, layout::kStop)) return;
  const std::uint64_t operations = load_weak(side.counter(layout::kReport));
  if (params.task == NicTestTask::additions) {
    if (lane_index() != 0) return;
    return side.compare(0, 0, operations, load_acquire<Scope::system>(side.counter(layout::kCounters)));
  }
  const std::uint32_t* words = side.words(layout::kIncoming);
  constexpr int kWords = layout::kMessages * static_cast<int>(layout::kMessageBytes / 4);
  const int sent = operations == 0 ? 0 : kWords;
  for (int i = lane_index(); i < sent; i += kWarpSize) side.compare(0, i, layout::word_of(0, i), load_weak(words + i));
}

DEEP_EP_DEVICE void send_by_wrong_key(Side& side) {
  side.queue().post(lane_index() == 0, [&](WorkQueueEntry& entry, const EntryHeader& header) {
    KeyedAddress to = side.remote(layout::kIncoming);
    to.key ^= 0x80;  // of mlx5's eight bits that tell a key from older ones of the same memory
    write_entry(entry, header, to, side.local(layout::kOutgoing), 64);
  });
  if (side.queue().quiet() && lane_index() == 0) side.result().operations = 1;
}

DEEP_EP_DEVICE void body(const NicTestParams& params, std::byte*) {
  const bool sends = warp_index() % 2 == 0;
  if (params.task == NicTestTask::wrong_key && !sends) return;
  Side side(params);
  switch (params.task) {
    case NicTestTask::entries:
    case NicTestTask::litmus:
      sends ? send_rounds(params, side) : receive_rounds(params, side);
      break;
    case NicTestTask::writes:
    case NicTestTask::additions:
      sends ? send_stream(params, side) : receive_stream(params, side);
      break;
    case NicTestTask::wrong_key:
      send_by_wrong_key(side);
      break;
  }
  if (sends) side.queue().quiet();
  side.queue().close();
}

}  // namespace deep_ep::device::nic_test

DEEP_EP_DEFINE_KERNEL(nic_test, deep_ep::device::nic_test::body)
