// The warp of a simulated NIC that makes visible what was moved: additions and completions, in order and in time.
#pragma once

#include "kernels/primitives/bits.hpp"
#include "simulation/kernels/simulated_pieces.hpp"

namespace deep_ep::device::simulated {

class Finisher {
 public:
  DEEP_EP_DEVICE Finisher(const SimulatedNicParams& params, PieceQueue& queue) : params_(params), queue_(queue) {}

  DEEP_EP_DEVICE void run() {
    for (;;) {
      const std::uint64_t head = wait_for_work();
      const std::uint64_t known = head & ~PieceQueue::kEnd;
      fence_moved(known);
      finish_due();
      if (head == (known | PieceQueue::kEnd) && tail_ == known) break;
    }
    if (lane_index() == 0) queue_.stop();  // for the warp that watches
  }

 private:
  /// Until the next piece was moved, the oldest one's time has come, or all is done and no more come.
  DEEP_EP_DEVICE std::uint64_t wait_for_work() const {
    return wait_for_word([&] { return load_acquire<Scope::block>(&queue_.head); },
                         [&](std::uint64_t head) {
                           if (fenced_ < (head & ~PieceQueue::kEnd) && is_moved(fenced_)) return true;
                           const bool waits = tail_ < fenced_;
                           if (waits && (now_ns() >= queue_.piece(tail_).due || queue_.is_stopped())) return true;
                           return head == (tail_ | PieceQueue::kEnd);
                         });
  }

  /// Of a piece that was put in: do its bytes lie in memory?
  DEEP_EP_DEVICE bool is_moved(std::uint64_t number) const {
    const Piece& piece = queue_.piece(number);
    if (piece.lent == 0) return load_acquire<Scope::block>(&queue_.slot(number).moved) == number + 1;
    return load_acquire<Scope::gpu>(&params_.lending->queue.slot(piece.add).moved) == piece.add + 1;
  }

  /// How many lanes from the first on say yes.
  DEEP_EP_DEVICE static int leading(bool yes) {
    const std::uint32_t no = ~warp::ballot(yes);
    return no == 0 ? kWarpSize : lowest_bit(no);
  }
  DEEP_EP_DEVICE static std::uint64_t mine(std::uint64_t from) {
    return from + static_cast<std::uint64_t>(lane_index());
  }

  /// Pieces that have been moved are put behind a fence, as many at once as there are: it waits for all that this SM
  /// has under way.
  DEEP_EP_DEVICE void fence_moved(std::uint64_t known) {
    std::uint64_t moved = fenced_;
    for (int count = kWarpSize; count == kWarpSize; moved += static_cast<std::uint64_t>(count)) {
      const std::uint64_t number = mine(moved);
      count = leading(number < known && is_moved(number));
    }
    if (moved == fenced_) return;
    warp::sync();  // what the lanes acquired is behind every lane's fence
    fence<Scope::system>();
    fenced_ = moved;
  }

  /// Of the pieces behind a fence, finishes those whose time has come. Most are nothing but bytes of long messages; the
  /// others, a lane's each, may come from many messages: an addition is a way to the peer and back.
  DEEP_EP_DEVICE void finish_due() {
    const std::uint64_t time = warp::shuffle(now_ns(), 0);
    std::uint64_t end = tail_, other = 0;
    int others = 0;
    for (int count = kWarpSize; count == kWarpSize;) {
      const std::uint64_t number = mine(end);
      const Piece& piece = queue_.piece(number);
      const bool ready = number < fenced_ && (piece.due <= time || queue_.is_stopped());
      count = leading(ready);
      std::uint32_t found = warp::ballot(lane_index() < count && piece.what != 0);
      if (others + count_bits(found) > kWarpSize) break;
      for (; found != 0; found &= found - 1, ++others) {
        if (lane_index() == others) other = end + static_cast<std::uint64_t>(lowest_bit(found));
      }
      end += static_cast<std::uint64_t>(count);
    }
    if (end == tail_) return;
    const Piece& piece = queue_.piece(other);
    const std::uint32_t what = lane_index() < others ? piece.what : 0;
    const int count = together(what, what == 0 ? 0 : piece.queue, what == 0 ? nullptr : piece.to, others);
    if (count != others) end = warp::shuffle(other, count);
    finish(piece, lane_index() < count ? what : 0, time);
    tail_ = end;
    warp::sync();  // every lane has read its pieces: their places may be used again
    if (lane_index() == 0) store_release<Scope::block>(&queue_.tail, tail_);
  }

  /// A piece of each lane, in the order of the lanes; `what` is 0 for lanes that have none.
  DEEP_EP_DEVICE void finish(const Piece& piece, std::uint32_t what, std::uint64_t time) const {
    if ((what & kAdds) != 0) {
      // The fence is before it, so this releases what the pieces brought.
      const std::uint64_t before =
          fetch_add_relaxed<Scope::system>(reinterpret_cast<std::uint64_t*>(piece.to), piece.add);
      store_relaxed<Scope::system>(reinterpret_cast<std::uint64_t*>(const_cast<std::byte*>(piece.from)), before);
    }
    warp::sync();  // additions are at their places before a completion says so
    const std::uint32_t completing = warp::ballot((what & kCompletes) != 0);
    if (completing == 0) return;
    if (const std::uint64_t most = params_.completion_ns; most != 0) {
      // Pieces behind these completions wait, too.
      const std::uint64_t until = time + scattered(tail_, most);
      for (int polls = 1; now_ns() < until && !queue_.is_stopped(); ++polls) pause(polls);
    }
    const std::uint32_t same = warp::match_any(what != 0 ? piece.queue : ~0u) & completing;
    const bool last = (what & kCompletes) != 0 && (same >> lane_index()) == 1;  // one entry: the last is left
    if (last && (what & kFails) != 0) {
      fail(piece);
    } else if (last) {
      store_release<Scope::system>(&params_.queues[piece.queue].completion->tail,
                                   rdma::tail_word(piece.index, rdma::kCompletionOk));
    }
    warp::sync();
  }

  /// Additions at once are in no order, so those of one queue pair to different words are not done together: how many
  /// pieces may be.
  DEEP_EP_DEVICE static int together(std::uint32_t what, std::uint32_t queue, const std::byte* to, int count) {
    const bool adds = (what & kAdds) != 0;
    const std::uint32_t adding = warp::ballot(adds);
    if ((adding & (adding - 1)) == 0) return count;
    const std::uint32_t before = warp::match_any(adds ? queue : ~0u) & adding & ((1u << lane_index()) - 1);
    const bool follows = adds && before != 0;
    const std::byte* other = warp::shuffle(to, follows ? lowest_bit(before) : lane_index());
    const std::uint32_t apart = warp::ballot(follows && other != to);
    const int first = apart == 0 ? kWarpSize : lowest_bit(apart);
    return first < count ? first : count;
  }

  DEEP_EP_DEVICE void fail(const Piece& piece) const {
    const SimulatedQueue& pair = params_.queues[piece.queue];
    const rdma::WorkQueueEntry& entry = pair.ring[static_cast<std::uint32_t>(piece.index) & (pair.depth - 1)];
    const std::uint32_t opcode = rdma::swap32(entry.segment[0].word[0]) & 0xffu;
    pair.completion->vendor_syndrome = 0;
    pair.completion->syndrome = static_cast<std::uint8_t>(piece.add);
    pair.completion->opcode_number = rdma::swap32(opcode << 24 | pair.number);
    store_release<Scope::system>(&pair.completion->tail, rdma::tail_word(piece.index, rdma::kCompletionError));
  }

  const SimulatedNicParams& params_;
  PieceQueue& queue_;
  std::uint64_t fenced_ = 0;  ///< pieces whose bytes are behind a fence
  std::uint64_t tail_ = 0;    ///< pieces finished
};

}  // namespace deep_ep::device::simulated
