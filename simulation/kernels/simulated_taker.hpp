// The warp of a simulated NIC that sees doorbells, fetches entries and cuts them into pieces.
#pragma once

#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/warp.hpp"
#include "simulation/kernels/simulated_lending.hpp"
#include "simulation/kernels/simulated_pieces.hpp"

namespace deep_ep::device::simulated {

class Taker {
 public:
  DEEP_EP_DEVICE Taker(const SimulatedNicParams& params, const Shared& shared, const Lender& lender)
      : params_(params),
        shared_(shared),
        queue_(shared.queue),
        lender_(lender),
        room_(lender.room()),
        begin_(warp::shuffle(now_ns(), 0)) {}

  /// Serves all queue pairs until it is told to stop, or its time is over.
  DEEP_EP_DEVICE void run() {
    for (bool over = false; !over;) {
      over = find_work();
      std::uint32_t with_work = over ? 0 : warp::ballot(found_.rung != 0);  // the next launch finds it again
      while (with_work != 0) {
        const int lane = lowest_bit(with_work);
        with_work &= with_work - 1;
        take(warp::shuffle(found_, lane));
      }
    }
    for (int q = lane_index(); q < params_.num_queues; q += kWarpSize) {
      params_.queues[q].taken = shared_.served[q].taken;
      params_.queues[q].way_free = shared_.served[q].way_free;
      params_.queues[q].failed = shared_.served[q].failed;
    }
    lender_.end();
    if (lane_index() == 0) store_release<Scope::block>(&queue_.head, head_ | PieceQueue::kEnd);
  }

 private:
  /// What a lane has found.
  struct Found {
    std::uint64_t rung = 0;  ///< what the doorbell says
    std::uint32_t queue = 0;
  };

  /// Waits until a lane finds a doorbell that was rung; true if the time is over.
  DEEP_EP_DEVICE bool find_work() {
    const std::uint64_t since = now_ns();
    bool over = false;
    for (int polls = 0; !WholeWarp::any(look() || over); ++polls) {
      pause(polls);
      over = lane_index() == 0 && ((params_.idle_ns != 0 && now_ns() - since > params_.idle_ns) || queue_.is_stopped());
    }
    over = WholeWarp::any(over || (params_.most_ns != 0 && now_ns() - begin_ > params_.most_ns));
    warp::sync();  // what a lane acquired, all may read
    return over;
  }

  /// Looks once at the doorbells of this lane's queue pairs, starting behind the one found last.
  DEEP_EP_DEVICE bool look() {
    const int mine = (params_.num_queues - lane_index() + kWarpSize - 1) / kWarpSize;
    found_.rung = 0;
    for (int i = 0; i < mine; ++i) {
      const int turn = turn_ + i < mine ? turn_ + i : turn_ + i - mine;
      const int q = lane_index() + turn * kWarpSize;
      const SimulatedQueue& served = shared_.served[q];
      if (served.failed || is_busy(served)) continue;
      // Acquiring takes time, so of several only the one with news is acquired.
      std::uint64_t rung = mine == 1 ? load_acquire<Scope::system>(params_.doorbells + q)
                                     : load_relaxed<Scope::system>(params_.doorbells + q);
      if (rung == 0 || rdma::doorbell_end(rung) == (served.taken & 0xffffu)) continue;
      if (mine != 1) rung = load_acquire<Scope::system>(params_.doorbells + q);
      found_ = {rung, static_cast<std::uint32_t>(q)};
      turn_ = turn + 1 < mine ? turn + 1 : 0;
      return true;
    }
    return false;
  }

  // Entries of a slow way are fetched one after the other, when the way has carried the one before: all queue pairs are
  // finished in one order, so one that waited there would hold up the others.

  DEEP_EP_DEVICE static bool is_busy(const SimulatedQueue& served) {
    return served.way_ns_per_byte != 0 && now_ns() < served.way_free;
  }

  /// Fetches entries of one queue pair, a lane each, and hands on what they ask for.
  DEEP_EP_DEVICE void take(const Found& found) {
    const std::uint32_t q = found.queue;
    SimulatedQueue& pair = shared_.served[q];
    const std::uint64_t taken = pair.taken;
    const std::uint32_t most = pair.way_ns_per_byte != 0 ? 1 : kWarpSize;
    const std::uint32_t fresh = (rdma::doorbell_end(found.rung) - static_cast<std::uint32_t>(taken)) & 0xffffu;
    int count = static_cast<int>(fresh < most ? fresh : most);
    const bool wanted = lane_index() < count;
    const std::uint32_t record = load_relaxed<Scope::system>(pair.doorbell_record);
    Piece entry{};  // as one piece
    entry.index = taken + static_cast<std::uint64_t>(lane_index());
    entry.queue = q;
    if (wanted) fetch(entry, pair);
    if (!rdma::doorbell_fits(found.rung, record, taken, pair.number, pair.depth))
      fail(entry, rdma::Syndrome::local_queue_pair);
    // What comes behind a failure is not executed.
    const std::uint32_t failures = warp::ballot(wanted && (entry.what & kFails) != 0);
    count = failures != 0 ? lowest_bit(failures) + 1 : count;
    set_times(entry, count);
    warp::sync();
    if (lane_index() == 0) {
      pair.taken = taken + static_cast<std::uint64_t>(count);
      pair.failed = failures != 0;
      const double on_way =
          pair.way_ns_per_byte * (static_cast<double>(entry.bytes) + SimulatedNicParams::kOverheadBytes);
      if (on_way != 0) pair.way_free = now_ns() + static_cast<std::uint64_t>(on_way);
    }
    warp::sync();
    hand_on(entry, count);
  }

  DEEP_EP_DEVICE static void fail(Piece& entry, rdma::Syndrome syndrome) {
    entry.bytes = 0;
    entry.add = static_cast<std::uint64_t>(syndrome);
    entry.what = kFails | kCompletes;
  }

  /// Null where the key or the range is wrong.
  DEEP_EP_DEVICE std::byte* find(const rdma::KeyedAddress& at, std::uint32_t bytes) const {
    const std::uint32_t place = at.key - params_.first_key;
    if (place >= static_cast<std::uint32_t>(params_.num_regions)) return nullptr;
    const rdma::Region region = shared_.regions[place];
    return region.at(at.address, bytes);
  }

  /// Fills in what the entry asks for.
  DEEP_EP_DEVICE void fetch(Piece& entry, const SimulatedQueue& pair) const {
    const rdma::WorkQueueEntry& in_ring = pair.ring[static_cast<std::uint32_t>(entry.index) & (pair.depth - 1)];
    rdma::WorkQueueEntry fetched;
#pragma unroll
    for (int i = 0; i < 4; ++i) fetched.segment[i] = load_weak(in_ring.segment + i);
    const rdma::Operation operation = rdma::decode(fetched, entry.index, pair.number);
    if (!operation.valid) return fail(entry, rdma::Syndrome::local_queue_pair);
    entry.what = operation.signalled ? kCompletes : 0;
    if (operation.length == 0) return;  // not checked, as on devices
    const bool adds = operation.opcode == rdma::kOpcodeFetchAdd;
    entry.from = operation.local.key == params_.heap_key ? find(operation.local, operation.length) : nullptr;
    const std::uint32_t key = pair.remote_key | (adds ? kSimulatedSignalKey : 0);
    const rdma::KeyedAddress remote{operation.remote.address, pair.remote_key};
    entry.to = operation.remote.key == key ? find(remote, operation.length) : nullptr;
    entry.bytes = operation.length;
    entry.add = operation.add;
    if (adds) entry.what |= kAdds;
    const rdma::Syndrome syndrome = rdma::answer(operation, entry.from, entry.to);
    if (syndrome != rdma::Syndrome::none) fail(entry, syndrome);
  }

  /// When the peer may see each: messages follow one another on the line.
  DEEP_EP_DEVICE void set_times(Piece& entry, int count) {
    const auto elapsed = static_cast<double>(warp::shuffle(now_ns(), 0) - begin_);
    const double bytes =
        lane_index() < count ? static_cast<double>(entry.bytes) + SimulatedNicParams::kOverheadBytes : 0.0;
    const double sent = (line_ > elapsed ? line_ : elapsed) + warp::inclusive_sum(bytes * params_.ns_per_byte);
    line_ = warp::shuffle(sent, kWarpSize - 1);
    entry.due = begin_ + static_cast<std::uint64_t>(sent + params_.held_ns);
  }

  /// Cuts the entries of the first `count` lanes into pieces, in the order of the lanes, and hands them on as there is
  /// room.
  DEEP_EP_DEVICE void hand_on(Piece entry, int count) {
    if ((entry.what & kAdds) != 0) entry.bytes = 0;
    const std::uint32_t cut = entry.bytes == 0 ? 1 : (entry.bytes + kPieceBytes - 1) / kPieceBytes;
    const std::uint32_t mine = lane_index() < count ? cut : 0;
    const std::uint32_t end = warp::inclusive_sum(mine);
    const std::uint32_t all = warp::shuffle(end, kWarpSize - 1);
    shared_.entries[lane_index()] = entry;
    warp::sync();
    for (std::uint32_t first = 0; first < all; first += kWarpSize) {
      const std::uint32_t number = first + static_cast<std::uint32_t>(lane_index());
      int owner = 0;  // whose piece it is: lanes that end before it do not own it
#pragma unroll
      for (int step = kWarpSize / 2; step > 0; step /= 2) {
        if (warp::shuffle(end, owner + step - 1) <= number) owner += step;
      }
      owner &= kWarpSize - 1;
      const std::uint32_t place = number - warp::shuffle(end - mine, owner);
      const std::uint64_t offset = std::uint64_t{place} * kPieceBytes;
      Piece piece = shared_.entries[owner];
      const bool is_last = piece.bytes <= offset + kPieceBytes;
      piece.to += offset;
      piece.from += offset;
      piece.bytes = is_last ? piece.bytes - static_cast<std::uint32_t>(offset) : kPieceBytes;
      if (!is_last) piece.what = 0;
      const std::uint32_t more = all - first < kWarpSize ? all - first : kWarpSize;
      if (head_ + more - tail_ > room_) {
        const std::uint64_t enough = head_ + more - room_;
        tail_ = wait_for_word([&] { return load_acquire<Scope::block>(&queue_.tail); },
                              [&](std::uint64_t tail) { return tail >= enough; });
      }
      if (lender_.lends()) lender_.lend(piece, head_ + static_cast<std::uint64_t>(lane_index()), number < all);
      if (number < all) queue_.piece(head_ + static_cast<std::uint64_t>(lane_index())) = piece;
      head_ += more;
      warp::sync();
      if (lane_index() == 0) store_release<Scope::block>(&queue_.head, head_);
    }
  }

  const SimulatedNicParams& params_;
  const Shared& shared_;
  PieceQueue& queue_;
  Lender lender_;
  std::uint64_t room_;   ///< pieces that may be under way
  std::uint64_t begin_;  ///< times are counted from here
  double line_ = 0;      ///< when the line is free
  int turn_ = 0;         ///< which of this lane's queue pairs is looked at first
  Found found_;
  std::uint64_t head_ = 0;
  std::uint64_t tail_ = 0;  ///< as last seen
};

}  // namespace deep_ep::device::simulated
