// A simulated NIC of two blocks: the first one does all that a NIC does, and lends pieces of long messages to the
// second one, which moves them. An SM moves no more than its port to the network of the GPU carries.
//
//   first block                                  second block
//   taker: lends a piece ---- head ---->         borrower: queues it for the movers of its block
//                                                movers: copy its bytes
//   listener: the piece <---- moved ----         teller: fences what was moved
//   was moved, as if here
//   finisher: fences, finishes in order
//
// So a piece that was lent takes some microseconds longer. Therefore none is, unless others stand before it that would
// take as long.
#pragma once

#include "simulation/kernels/simulated_fencer.hpp"
#include "simulation/kernels/simulated_pieces.hpp"

namespace deep_ep::device::simulated {

/// The taker's part.
class Lender {
 public:
  /// `before`: what has been lent in the launches before.
  DEEP_EP_DEVICE Lender(const SimulatedNicParams& params, PieceQueue& queue, int movers, std::uint64_t before)
      : params_(params), queue_(queue), movers_(static_cast<std::uint32_t>(movers)), head_(before) {}

  /// How many pieces may be under way at once. A mover looks at a piece that was lent, and nobody waits until it has.
  /// But its next piece, `movers` further on, is never lent, and it moves that one after the look. So where as many
  /// places stay empty, whoever takes a place again has seen finished the piece that its mover moved behind the look.
  DEEP_EP_DEVICE std::uint32_t room() const {
    return params_.lending == nullptr ? params_.pieces : params_.pieces - movers_;
  }

  /// Is there a helper? It may come later than this block, or, where there is no room, not at all.
  DEEP_EP_DEVICE bool lends() {
    if (params_.lending == nullptr || helped_) return helped_;
    helped_ = warp::shuffle(load_acquire<Scope::gpu>(&params_.lending->helping), 0) == params_.launch;
    return helped_;
  }

  /// By all lanes, each with a piece if `mine`, which gets that number: lends some, before they are queued here.
  DEEP_EP_DEVICE void lend(Piece& piece, std::uint64_t number, bool mine) {
    const std::uint64_t behind = number - load_relaxed<Scope::block>(&queue_.tail);
    // Each of this block's movers has every other piece: those that are one behind the other are not its own alone. And
    // room() relies on it.
    const bool other_turn = static_cast<std::uint32_t>(number) / movers_ % 2 != 0;
    const bool lent =
        mine && other_turn && behind >= params_.lent_behind && piece.bytes == kPieceBytes && piece.what == 0;
    const std::uint32_t all = warp::ballot(lent);
    if (all == 0) return;
    if (lent) {
      const std::uint64_t place = head_ + static_cast<std::uint64_t>(count_bits(all & ((1u << lane_index()) - 1)));
      params_.lending->pieces[place % kMostPieces] = piece;
      queue_.slot(place).lent_number = number;
      piece.lent = 1;
    }
    const auto count = static_cast<std::uint64_t>(count_bits(all));
    head_ += count;
    warp::sync();
    if (lane_index() != 0) return;
    store_release<Scope::block>(&queue_.lent, queue_.lent + count);
    store_release<Scope::gpu>(&params_.lending->head, head_);
  }

  DEEP_EP_DEVICE void end() const {
    if (params_.lending != nullptr && lane_index() == 0) {
      store_release<Scope::gpu>(&params_.lending->ended, params_.launch);
    }
  }

 private:
  const SimulatedNicParams& params_;
  PieceQueue& queue_;
  std::uint32_t movers_;
  std::uint64_t head_;  ///< pieces lent, as Lending::head counts them
  bool helped_ = false;
};

/// Of the first block, a warp that hears what the helper has moved.
class Listener {
 public:
  /// `before`: what has been lent in the launches before.
  DEEP_EP_DEVICE Listener(const SimulatedNicParams& params, PieceQueue& queue, std::uint64_t before)
      : lending_(*params.lending), queue_(queue), heard_(before) {}

  DEEP_EP_DEVICE void run() {
    for (std::uint64_t heard = 0; await_lent(heard);) heard += tell();
  }

 private:
  /// Waits until more than `heard` pieces have been lent; false if no more are.
  DEEP_EP_DEVICE bool await_lent(std::uint64_t heard) const {
    bool more = false;
    if (lane_index() == 0) {
      for (int polls = 0;; ++polls) {
        // In this order: the last piece is lent before the end.
        const bool ends = (load_acquire<Scope::block>(&queue_.head) & PieceQueue::kEnd) != 0;
        more = load_acquire<Scope::block>(&queue_.lent) > heard;
        if (more || ends) break;
        pause(polls);
      }
    }
    return warp::any(more);
  }

  /// Waits for some that have been moved, and says so here. How many.
  DEEP_EP_DEVICE std::uint64_t tell() {
    std::uint64_t moved = 0;
    if (lane_index() == 0) {
      for (int polls = 0; (moved = load_acquire<Scope::gpu>(&lending_.moved)) == heard_; ++polls) pause(polls);
    }
    moved = warp::shuffle(moved, 0);
    warp::sync();
    const std::uint64_t count = moved - heard_;
    for (std::uint64_t i = heard_ + static_cast<std::uint64_t>(lane_index()); i < moved; i += kWarpSize) {
      const std::uint64_t number = queue_.slot(i).lent_number;
      store_release<Scope::block>(&queue_.moved_of(number), number + 1);
    }
    heard_ = moved;
    return count;
  }

  const Lending& lending_;
  PieceQueue& queue_;
  std::uint64_t heard_;  ///< as Lending::moved counts them
};

/// Of the second block, the warp that queues for its movers what was lent.
class Borrower {
 public:
  /// `before`: what has been lent in the launches before.
  DEEP_EP_DEVICE Borrower(const SimulatedNicParams& params, PieceQueue& queue, std::uint64_t before)
      : lending_(*params.lending), launch_(params.launch), queue_(queue), before_(before) {}

  DEEP_EP_DEVICE void run() {
    if (lane_index() == 0) store_release<Scope::gpu>(&lending_.helping, launch_);
    for (std::uint64_t head = before_; await_more(head);) {
      const std::uint64_t number = head + static_cast<std::uint64_t>(lane_index());
      if (number < known_) queue_.piece(number - before_) = lending_.pieces[number % kMostPieces];
      head = head + kWarpSize < known_ ? head + kWarpSize : known_;
      warp::sync();
      if (lane_index() == 0) store_release<Scope::block>(&queue_.head, head - before_);
      end_ = head - before_;
    }
    if (lane_index() == 0) store_release<Scope::block>(&queue_.head, end_ | PieceQueue::kEnd);
  }

 private:
  /// Waits until there are more than `head`; false if no more are lent.
  DEEP_EP_DEVICE bool await_more(std::uint64_t head) {
    if (head < known_) return true;
    if (lane_index() == 0) {
      for (int polls = 0;; ++polls) {
        const bool ended = load_acquire<Scope::gpu>(&lending_.ended) == launch_;
        known_ = load_acquire<Scope::gpu>(&lending_.head);
        if (known_ != head || ended) break;
        pause(polls);
      }
    }
    known_ = warp::shuffle(known_, 0);
    warp::sync();
    return head < known_;
  }

  Lending& lending_;
  std::uint64_t launch_;
  PieceQueue& queue_;
  std::uint64_t before_;
  std::uint64_t known_ = 0;  ///< pieces lent
  std::uint64_t end_ = 0;    ///< queued in this launch
};

/// Of the second block, the warp that says what was moved.
class Teller : Fencer {
 public:
  /// `before`: what has been lent in the launches before.
  DEEP_EP_DEVICE Teller(const SimulatedNicParams& params, PieceQueue& queue, std::uint64_t before)
      : Fencer(queue), moved_(params.lending->moved), before_(before) {}

  DEEP_EP_DEVICE void run() {
    for (bool over = false; !over;) {
      wait_for_work();
      const std::uint64_t head = warp::shuffle(load_acquire<Scope::block>(&queue_.head), 0);
      const std::uint64_t told = fenced_;
      fence_moved(head & ~PieceQueue::kEnd);
      warp::sync();
      if (told != fenced_ && lane_index() == 0) store_release<Scope::gpu>(&moved_, before_ + fenced_);
      over = head == (fenced_ | PieceQueue::kEnd);
    }
    if (lane_index() == 0) queue_.stop();  // for the warp that watches
  }

 private:
  /// One lane polls: until the next piece was moved, or all are told and no more come.
  DEEP_EP_DEVICE void wait_for_work() const {
    if (lane_index() == 0) {
      for (int polls = 0;; ++polls) {
        if (load_acquire<Scope::block>(&queue_.moved_of(fenced_)) == fenced_ + 1) break;
        if (load_acquire<Scope::block>(&queue_.head) == (fenced_ | PieceQueue::kEnd)) break;
        pause(polls);
      }
    }
    warp::sync();
  }

  std::uint64_t& moved_;
  std::uint64_t before_;
};

}  // namespace deep_ep::device::simulated
