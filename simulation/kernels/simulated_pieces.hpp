// Between the warps of a simulated NIC: a queue of pieces in shared memory. The taker puts them in, movers copy their
// bytes, the finisher takes them out in the same order. And between the blocks of one: pieces lent in device memory.
#pragma once

#include "kernels/common/carver.hpp"
#include "kernels/primitives/mbarrier.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/warp.hpp"
#include "simulation/kernels/simulated_nic.hpp"

namespace deep_ep::device::simulated {

inline constexpr std::uint32_t kPieceBytes = 4096;  ///< what a warp copies at once
inline constexpr std::uint32_t kMostPieces = 512;   ///< under way: a power of two
inline constexpr std::uint32_t kMoverStages = SimulatedNicParams::kMoverStages;

/// What is behind a piece, in Piece::what.
inline constexpr std::uint32_t kAdds = 1;       ///< an addition to `to`; the value before goes to `from`
inline constexpr std::uint32_t kCompletes = 2;  ///< its entry asks for a completion
inline constexpr std::uint32_t kFails = 4;      ///< its entry fails: `add` is the syndrome

struct Piece {
  std::byte* to;
  const std::byte* from;
  std::uint64_t add;    ///< of a piece that was lent, its number among those
  std::uint64_t index;  ///< of the entry
  std::uint64_t due;    ///< when the peer may see what is behind the piece
  std::uint32_t bytes;
  std::uint32_t queue;
  std::uint32_t what;
  std::uint32_t lent;  ///< 1: the other block moves it
};

struct PieceQueue {
  static constexpr std::uint64_t kEnd = std::uint64_t{1} << 63;

  struct Slot {
    Piece piece;
    std::uint64_t moved;  ///< number + 1 of the piece that lies in memory
  };

  std::uint64_t head;     ///< pieces put in; with kEnd, the last ones
  std::uint64_t tail;     ///< pieces finished
  std::uint64_t stopped;  ///< not 0: nothing is taken any more, and nothing waits for its time
  Slot slots[kMostPieces];

  DEEP_EP_DEVICE Slot& slot(std::uint64_t number) { return slots[number % kMostPieces]; }
  DEEP_EP_DEVICE Piece& piece(std::uint64_t number) { return slot(number).piece; }
  DEEP_EP_DEVICE bool is_stopped() const { return load_relaxed<Scope::block>(&stopped) != 0; }
  DEEP_EP_DEVICE void stop() { store_relaxed<Scope::block>(&stopped, 1); }
};

/// From the block that serves queue pairs to the one that helps to move. Numbers go on from launch to launch. (Pieces
/// under way are no more than kMostPieces, so those lent are not, either.)
struct Lending {
  std::uint64_t helping;  ///< the launch in which there is a helper
  std::uint64_t ended;    ///< the launch in which no more are lent; written behind the last `head`
  alignas(kLine) PieceQueue queue;
};

/// Shared memory of a block.
struct Shared {
  PieceQueue& queue;
  SimulatedQueue* served;  ///< [num_queues]: loads from memory come one after the other until a message leaves
  Piece* entries;          ///< [32]: those of the taker's lanes, as one piece each
  rdma::Region* regions;   ///< [num_regions]
  Mbarrier* barriers;      ///< [movers][kMoverStages]
  std::byte* stages;       ///< [movers][kMoverStages], kPieceBytes each
  std::size_t bytes;

  DEEP_EP_HOST_DEVICE Shared(Carver carver, std::size_t num_queues, std::size_t num_regions, std::size_t movers)
      : queue(*carver.take<PieceQueue>()),
        served(carver.take<SimulatedQueue>(num_queues)),
        entries(carver.take<Piece>(kWarpSize)),
        regions(carver.take<rdma::Region>(num_regions)),
        barriers(carver.take<Mbarrier>(movers * kMoverStages)),
        stages(carver.take<std::byte>(movers * kMoverStages * kPieceBytes, kLine)),
        bytes(carver.bytes()) {}

  /// By all threads of the block, before a sync.
  DEEP_EP_DEVICE void fill(const SimulatedNicParams& params) const {
    if (thread_index() == 0) queue.head = queue.tail = queue.stopped = 0;
    for (int i = thread_index(); i < static_cast<int>(kMostPieces); i += block_threads()) queue.slots[i].moved = 0;
    for (int i = thread_index(); i < params.num_regions; i += block_threads()) regions[i] = params.regions[i];
    for (int i = thread_index(); i < params.num_queues; i += block_threads()) served[i] = params.queues[i];
  }
};

/// Below `below`, differently for each number.
DEEP_EP_DEVICE std::uint64_t scattered(std::uint64_t number, std::uint64_t below) {
  return ((number + 1) * 0x9e3779b97f4a7c15u >> 20) % below;
}

/// By a warp: one lane polls until `look()` gives enough, and all get that. All may read what it has acquired.
template <class Look, class Enough>
DEEP_EP_DEVICE std::uint64_t wait_for_word(Look look, Enough enough) {
  std::uint64_t seen = 0;
  if (lane_index() == 0) {
    for (int spins = 0; !enough(seen = look()); ++spins) pause(spins);
  }
  seen = warp::shuffle(seen, 0);
  warp::sync();
  return seen;
}

}  // namespace deep_ep::device::simulated
