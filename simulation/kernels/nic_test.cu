// Proves on a machine what its NIC has to do for this library. The senders' entries go through the send queue that all
// kernels use; what arrives is looked at by receivers, on this machine or on the other one.
#include "simulation/kernels/nic_test.hpp"

#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/warp.hpp"
#include "kernels/rdma/port_channel.hpp"

namespace deep_ep::device::nic_test {

namespace layout = deep_ep::nic_test;

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
  DEEP_EP_DEVICE std::uint32_t* words(std::uint64_t at) const {
    return reinterpret_cast<std::uint32_t*>(params_.heap + base_ + at);
  }
  DEEP_EP_DEVICE const std::uint64_t* counter(std::uint64_t at) const {
    return reinterpret_cast<const std::uint64_t*>(params_.heap + base_ + at);
  }

  DEEP_EP_DEVICE bool put(std::uint64_t to, std::uint64_t from, std::uint32_t bytes, bool wanted = true) {
    return queue_.put(base_ + to, base_ + from, bytes, wanted);
  }
  DEEP_EP_DEVICE bool add(std::uint64_t at, std::uint64_t value, bool wanted = true) {
    return queue_.signal_add(base_ + at, value, wanted);
  }
  /// Adds to a word of the other side, and rings.
  DEEP_EP_DEVICE bool signal(std::uint64_t at, std::uint64_t value) {
    const bool good = add(at, value, lane_index() == 0);
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
  const RdmaQueuePair& peer_;
  std::uint64_t base_;
  const WaitContext& wait_;
  rdma::PortChannel<WholeWarp> queue_;
};

// ---- Writes and additions ----

DEEP_EP_DEVICE std::uint64_t counter_at(int i) { return layout::kCounters + 8 * static_cast<std::uint64_t>(i); }
/// The number that is added to the `i`th counter in turn.
DEEP_EP_DEVICE std::uint64_t step(const NicTestTask& task, int i) {
  return static_cast<std::uint64_t>(i % task.counters + 1);
}

DEEP_EP_DEVICE void send(const NicTestParams& params, Side& side) {
  const NicTestTask& batch = params.task;
  bool good = side.put(layout::kIncoming, layout::kOutgoing, 64, lane_index() == 0) && side.queue().quiet();
  if (batch.entries == 0) return;
  const auto write = [&](std::uint64_t round) {
    std::uint32_t* words = side.words(layout::kOutgoing);
    for (int i = lane_index(); i < batch.places * batch.words; i += kWarpSize) words[i] = layout::word_of(round, i);
    warp::sync();  // what a lane sends was written by all of them
  };
  if (!batch.answered) write(0);
  const std::uint64_t begin = warp::shuffle(now_ns(), 0);
  const auto took = [&] { return warp::shuffle(now_ns(), 0) - begin; };
  std::uint64_t operations = 0, sent = 0;
  const std::uint32_t bytes = 4 * static_cast<std::uint32_t>(batch.words);
  std::uint64_t before = 0;  // tickets of the last two batches: no more is under way
  for (std::uint64_t round = 1; good && operations < params.operations && took() < params.budget_ns; ++round) {
    const std::uint64_t ticket = side.queue().posted();
    if (batch.answered) write(round);
    for (int i = lane_index(); i < batch.entries; i += kWarpSize) {
      if (batch.places != 0) {
        const std::uint64_t at = std::uint64_t{bytes} * static_cast<std::uint64_t>(i % batch.places);
        good = good && side.put(layout::kIncoming + at, layout::kOutgoing + at, bytes);
      }
      if (batch.counters != 0) good = good && side.add(counter_at(i % batch.counters), step(batch, i));
    }
    if (!batch.answered) {
      side.queue().flush();
      good = good && side.queue().wait_for(before);
      before = ticket;
      operations += kWarpSize;
      sent += std::uint64_t{kWarpSize} * (batch.places != 0 ? bytes : 8);
      continue;
    }
    // Of entries only the data is looked at, not its order.
    good = good && (batch.counters == 0 || side.queue().quiet());
    good = good && side.signal(layout::kSignal, 1) && side.wait(layout::kAnswer, round);
    if (good) operations += batch.counters == 0 ? 1 : 2 * layout::kSlots + 1;
  }
  good = good && side.queue().quiet();
  const std::uint64_t nanoseconds = took();
  if (lane_index() == 0) {
    side.result().operations = operations;
    side.result().bytes = sent;
    side.result().nanoseconds = nanoseconds;
  }
  good = good && side.add(layout::kReport, operations, lane_index() == 0);
  if (good) side.signal(layout::kSignal, layout::kStop);
}

/// Looks at the data of this round, or, of batches without answers, of all (0).
DEEP_EP_DEVICE void check(const NicTestTask& batch, const Side& side, std::uint64_t round) {
  const std::uint64_t sent = load_weak(side.counter(layout::kReport));
  const std::uint32_t* words = side.words(layout::kIncoming);
  const int count = round == 0 && sent == 0 ? 0 : batch.places * batch.words;
  for (int i = count - 1 - lane_index(); i >= 0; i -= kWarpSize) {  // what was sent last first
    side.compare(round, i / batch.words, layout::word_of(round, i), load_weak(words + i));
  }
  for (int i = lane_index(); i < batch.counters; i += kWarpSize) {
    side.compare(round, layout::kSlots + i, round == 0 ? sent : round * step(batch, i),
                 load_acquire<Scope::system>(side.counter(counter_at(i))));
  }
}

/// Looks at every round of the sender, and answers; or looks once.
DEEP_EP_DEVICE void receive(const NicTestParams& params, Side& side) {
  const NicTestTask& batch = params.task;
  if (!batch.answered) {
    if (side.wait(layout::kSignal, layout::kStop)) check(batch, side, 0);
    return;
  }
  for (std::uint64_t round = 1; side.wait(layout::kSignal, round) && !side.stopped(); ++round) {
    check(batch, side, round);
    if (!side.signal(layout::kAnswer, 1)) break;
  }
}

DEEP_EP_DEVICE void body(const NicTestParams& params, std::byte*) {
  const bool sends = warp_index() % 2 == 0;
  if (params.task.entries == 0 && !sends) return;
  Side side(params);
  sends ? send(params, side) : receive(params, side);
  if (sends) side.queue().quiet();
  side.queue().close();
}

}  // namespace deep_ep::device::nic_test

DEEP_EP_DEFINE_KERNEL(nic_test, deep_ep::device::nic_test::body)
