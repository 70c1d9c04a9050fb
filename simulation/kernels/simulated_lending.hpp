// A simulated NIC of two blocks: the first one does all that a NIC does, and lends pieces of long messages to the
// second one, which only moves. An SM moves no more than its port to the network of the GPU carries.
//
// The second block takes pieces from device memory and says there that they were moved, which the finisher sees some
// microseconds later than of its own. So no piece is lent, unless others stand before it that would take as long.
#pragma once

#include "kernels/primitives/bits.hpp"
#include "simulation/kernels/simulated_pieces.hpp"

namespace deep_ep::device::simulated {

/// The taker's part.
class Lender {
 public:
  DEEP_EP_DEVICE Lender(const SimulatedNicParams& params, PieceQueue& queue, int movers)
      : params_(params),
        queue_(queue),
        movers_(static_cast<std::uint32_t>(movers)),
        head_(params.lending == nullptr ? 0 : load_relaxed<Scope::gpu>(&params.lending->queue.head)) {}

  /// How many pieces may be under way at once. A mover looks at a piece that was lent, and nobody waits until it has.
  /// But its next piece, `movers` further on, is never lent, and it moves that one after the look. So where as many
  /// places stay empty, whoever takes a place again has seen finished the piece that its mover moved behind the look.
  DEEP_EP_DEVICE std::uint32_t room() const { return params_.lending == nullptr ? kMostPieces : kMostPieces - movers_; }

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
      piece.lent = 1;
      piece.add = head_ + static_cast<std::uint64_t>(count_bits(all & ((1u << lane_index()) - 1)));
      params_.lending->queue.piece(piece.add) = piece;
    }
    head_ += static_cast<std::uint64_t>(count_bits(all));
    warp::sync();
    if (lane_index() == 0) store_release<Scope::gpu>(&params_.lending->queue.head, head_);
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
  std::uint64_t head_;  ///< pieces lent
  bool helped_ = false;
};

/// The pieces that a block's movers take: its own, or, in the second block, those that were lent.
class Pieces {
 public:
  /// `own`: null in the second block. Nothing is lent before `helping` is written, so until then all of that block find
  /// the same `head`: what was lent before.
  DEEP_EP_DEVICE Pieces(const SimulatedNicParams& params, PieceQueue* own)
      : queue_(own != nullptr ? *own : params.lending->queue),
        is_own_(own != nullptr),
        params_(params),
        first_(is_own_ ? 0 : load_relaxed<Scope::gpu>(&queue_.head)) {}

  DEEP_EP_DEVICE std::uint64_t first() const { return first_; }
  DEEP_EP_DEVICE const Piece& operator[](std::uint64_t number) const { return queue_.piece(number); }
  /// How many there are so far, with PieceQueue::kEnd if no more come.
  DEEP_EP_DEVICE std::uint64_t known() const {
    if (is_own_) return load_acquire<Scope::block>(&queue_.head);
    // In this order: the last piece is lent before the end.
    const bool ended = load_acquire<Scope::gpu>(&params_.lending->ended) == params_.launch;
    return load_acquire<Scope::gpu>(&queue_.head) | (ended ? PieceQueue::kEnd : 0);
  }
  /// By one lane.
  DEEP_EP_DEVICE void tell_moved(std::uint64_t number) const {
    if (is_own_) return store_release<Scope::block>(&queue_.slot(number).moved, number + 1);
    store_release<Scope::gpu>(&queue_.slot(number).moved, number + 1);
  }
  /// Does the other block move it? Lender::room() keeps the place of such a piece until this has been seen.
  DEEP_EP_DEVICE bool is_lent(const Piece& piece) const { return is_own_ && piece.lent != 0; }
  DEEP_EP_DEVICE bool is_stopped() const { return is_own_ && queue_.is_stopped(); }

 private:
  PieceQueue& queue_;
  bool is_own_;
  const SimulatedNicParams& params_;
  std::uint64_t first_;
};

}  // namespace deep_ep::device::simulated
