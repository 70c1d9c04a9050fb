// The warps of a simulated NIC that copy: mover i of n in a block takes the pieces i, i + n, i + 2n, ...
#pragma once

#include "kernels/common/row_copy.hpp"
#include "kernels/common/row_pipe.hpp"
#include "simulation/kernels/simulated_lending.hpp"

namespace deep_ep::device::simulated {

/// A warp that moves the pieces mover, mover + movers, mover + 2 * movers, ... until the last one: large ones by bulk
/// copies, of which several are under way, others at once by its lanes. (Loads and stores move as much, but need twice
/// as many warps.)
class Mover {
 public:
  DEEP_EP_DEVICE Mover(const SimulatedNicParams& params, const Pieces& pieces, const RowPipe& pipe, int mover,
                       int movers)
      : params_(params),
        pieces_(pieces),
        pipe_(pipe),
        number_(pieces.first() + static_cast<std::uint64_t>(mover)),
        step_(static_cast<std::uint64_t>(movers)) {}

  DEEP_EP_DEVICE void run() {
    for (;;) {
      const bool idle = told_ == pipe_.loaded;
      if (idle && number_ >= known_) await_piece();
      const bool there = is_there();
      if (idle && !there) return;
      const bool many_loads = pipe_.loaded - pipe_.stored == kMostLoads;
      const bool many_stores = pipe_.stored - told_ == kMostStores;
      if (there && !many_loads && !many_stores) {
        begin();
      } else if (pipe_.loaded != pipe_.stored && !many_stores) {
        store_next();
      } else {
        tell(many_stores ? kMostStores / 2 : 0);
      }
    }
  }

 private:
  static constexpr std::uint32_t kMostLoads = kMoverStages - 1;
  static constexpr std::uint32_t kMostStores = 6;  ///< that may have left their stages, but are not yet there
  static constexpr std::uint32_t kFewestBulkBytes = 1024;

  /// Waits for the next piece, or until there are no more: kEnd is more than any number.
  DEEP_EP_DEVICE void await_piece() const {
    wait_for_word([&] { return pieces_.known(); }, [&](std::uint64_t seen) { return seen > number_; });
  }
  /// Looks only where what it has seen is not enough: fences take time.
  DEEP_EP_DEVICE bool is_there() {
    if (number_ < known_) return true;
    known_ = warp::shuffle(pieces_.known(), 0) & ~PieceQueue::kEnd;
    warp::sync();          // what the first lane acquired, all may read
    bulk::fence_global();  // what the doorbells said is written, bulk copies may read, or overwrite
    return number_ < known_;
  }

  DEEP_EP_DEVICE void begin() {
    const Piece& piece = pieces_[number_];
    if (pieces_.is_lent(piece)) {
      number_ += step_;
      return;
    }
    if (params_.reorder_ns != 0 && piece.bytes != 0) {
      const std::uint64_t until = now_ns() + scattered(number_, params_.reorder_ns);
      for (int spins = 1; now_ns() < until && !pieces_.is_stopped(); ++spins) pause(spins);
    }
    const auto to = reinterpret_cast<std::uintptr_t>(piece.to), from = reinterpret_cast<std::uintptr_t>(piece.from);
    const bool aligned = (to | from | piece.bytes) % 16 == 0;
    if (aligned && piece.bytes >= kFewestBulkBytes) {
      if (lane_index() == static_cast<int>(pipe_.loaded % kWarpSize)) copying_ = number_;
      pipe_.begin(piece.from, piece.bytes);
    } else {
      if (aligned) {
        copy_row(piece.to, piece.from, piece.bytes);
      } else {
        warp::each(static_cast<int>(piece.bytes), [&](int i) { piece.to[i] = piece.from[i]; });
      }
      warp::sync();
      if (lane_index() == 0) pieces_.tell_moved(number_);
    }
    number_ += step_;
  }
  DEEP_EP_DEVICE void store_next() {
    const Piece& piece = pieces_[copying(pipe_.stored)];
    pipe_.store(piece.bytes, [&](auto store) {
      if (lane_index() == 0) store(piece.to);
    });
  }
  /// Of the pieces that have left their stages, all but the latest `left` are waited for.
  DEEP_EP_DEVICE void tell(std::uint32_t left) {
    if (lane_index() == 0) {
      bulk::wait(static_cast<int>(left));
      bulk::fence_global();
    }
    for (; told_ != pipe_.stored - left; ++told_) {
      const std::uint64_t number = copying(told_);
      if (lane_index() == 0) pieces_.tell_moved(number);
    }
    warp::sync();
  }

  /// The piece of the `i`th bulk copy.
  DEEP_EP_DEVICE std::uint64_t copying(std::uint32_t i) const {
    return warp::shuffle(copying_, static_cast<int>(i % kWarpSize));
  }

  const SimulatedNicParams& params_;
  Pieces pieces_;
  RowPipe pipe_;  ///< of its pieces, those copied in bulk
  std::uint64_t number_;
  std::uint64_t step_;
  std::uint64_t known_ = 0;    ///< pieces that it may move
  std::uint64_t copying_ = 0;  ///< lane i: the piece of the bulk copies i, i + 32, ...
  std::uint32_t told_ = 0;     ///< bulk copies whose pieces lie in memory
};

}  // namespace deep_ep::device::simulated
