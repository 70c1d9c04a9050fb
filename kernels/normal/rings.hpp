// The rings that rows go through: between nodes, and inside a node where a rank cannot write rows into place.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/common/carver.hpp"
#include "kernels/common/faults.hpp"
#include "kernels/normal/control_window.hpp"
#include "kernels/primitives/divisor.hpp"

namespace deep_ep {

// The rings that rows cross the network through: for each other node a landing ring, which this rank's rail there
// writes, and a staging ring, which this rank's NIC reads.
//
// A ring has equal chunks, a chunk a few slots, a slot one row with all that belongs to it. Chunk c of a call
// takes the place of chunk c - chunks; none wraps, so a chunk is one RDMA write. Every call divides the same memory by
// its own row size: a ring is written in a call only when its reader has read all rows of the call before.
//
// Several queue pairs to a rail are not ordered among each other. With several, each place of a ring has a word of its
// own, which says what chunk has landed there.

struct Rings {
  static constexpr int kRows = 16;                                 ///< of a chunk, where there is room
  static constexpr std::size_t kMostBytes = std::size_t{1} << 30;  ///< of a chunk of several rows: one RDMA write

  std::size_t begin = 0;       ///< offset in the heap: landing rings, then staging rings
  std::size_t ring_bytes = 0;  ///< whole lines
  int others = 0;              ///< other nodes
  std::uint32_t slot_bytes = 0;
  Divisor chunk_rows = 1;
  Divisor chunks = 0;

  /// For rows of `row_bytes`, all included, in memory of `bytes` bytes. chunks is 0 where two do not fit.
  static Rings make(std::size_t begin, std::size_t bytes, int others, std::size_t row_bytes) {
    Rings rings;
    rings.begin = begin;
    rings.others = others;
    rings.ring_bytes = bytes / static_cast<std::size_t>(2 * others) / kLine * kLine;
    rings.slot_bytes = static_cast<std::uint32_t>(align_to_line(row_bytes));
    const std::size_t slots = rings.ring_bytes / rings.slot_bytes;
    constexpr std::size_t kFewChunks = 4;
    int rows = slots >= kFewChunks * kRows ? kRows : slots < kFewChunks ? 1 : static_cast<int>(slots / kFewChunks);
    while (rows > 1 && rings.slot_bytes * static_cast<std::size_t>(rows) > kMostBytes) rows /= 2;
    const std::size_t fit = slots / static_cast<std::size_t>(rows);
    rings.chunk_rows = rows;
    rings.chunks = fit < 2 ? 0 : static_cast<int>(std::min<std::size_t>(fit, ControlWindow::kMostChunks));
    return rings;
  }

  DEEP_EP_HOST_DEVICE int chunk_of(int row) const { return row / chunk_rows; }
  DEEP_EP_HOST_DEVICE int chunks_for(int rows) const { return (rows + chunk_rows - 1) / chunk_rows; }
  DEEP_EP_HOST_DEVICE std::uint32_t rows_in(int chunk, int rows) const {
    const int rest = rows - chunk * chunk_rows;
    return static_cast<std::uint32_t>(rest < chunk_rows ? rest : int{chunk_rows});
  }

  /// Of other node `number`.
  DEEP_EP_HOST_DEVICE Place<std::byte> landing(int number, int row) const { return slot(number, row); }
  DEEP_EP_HOST_DEVICE Place<std::byte> staging(int number, int row) const { return slot(others + number, row); }

  /// How far a ring, or a place in it, has come with chunk `chunk` of call `call` (from 0).
  DEEP_EP_HOST_DEVICE static constexpr std::uint64_t through(std::uint64_t call, int chunk) {
    return Progress::at(call, static_cast<std::uint32_t>(chunk) + 1);
  }
  /// How far it must have been read before chunk `chunk` may be written.
  DEEP_EP_HOST_DEVICE std::uint64_t room_for(std::uint64_t call, int chunk) const {
    return chunk < chunks ? Progress::at(call) : through(call, chunk - chunks);
  }

 private:
  DEEP_EP_HOST_DEVICE Place<std::byte> slot(int ring, int row) const {
    const int at = chunk_of(row) % chunks * chunk_rows + row % chunk_rows;
    return {begin + static_cast<std::size_t>(ring) * ring_bytes + static_cast<std::size_t>(at) * slot_bytes};
  }
};

/// Rings between ranks of one node, for rows that one of them cannot write into place, or read where they are. A ring
/// has one writer and one reader. Row n passes through slot n % slots; a slot has words that say how far its rows have
/// come (TokenRing).
struct LocalRings {
  static constexpr std::size_t kMostBytes = std::size_t{64} << 20, kMostOfRank = std::size_t{256} << 10;

  std::size_t begin = 0;  ///< offset in the heap
  std::uint32_t slot_bytes = 0;
  Divisor slots = 0;  ///< of a ring; 0: there is no room for one in each
  RingWords words{};
  Wanted row = Wanted::nothing, room = Wanted::nothing;  ///< what the ends of a ring wait for

  /// Between nodes: how much of a window of `window_bytes` they take. Calls divide the rest differently, so it stays
  /// where it is.
  static std::size_t bytes_of(std::size_t window_bytes, int num_ranks) {
    const std::size_t most = std::max(kMostBytes, static_cast<std::size_t>(num_ranks) * kMostOfRank);
    return std::min(window_bytes / 4, most) / kLine * kLine;
  }
  /// `bytes` bytes for `rings` rings of a rank, for rows of `row_bytes`, all included.
  static LocalRings make(std::size_t begin, std::size_t bytes, int rings, std::size_t row_bytes, const RingWords& words,
                         Wanted row, Wanted room) {
    const std::size_t slot_bytes = align_to_line(row_bytes);
    const std::size_t slots =
        std::min(bytes / slot_bytes / static_cast<std::size_t>(rings), static_cast<std::size_t>(words.slots));
    return {begin, static_cast<std::uint32_t>(slot_bytes), static_cast<int>(slots), words, row, room};
  }

  /// The number, among all slots, of that of row `n`.
  DEEP_EP_HOST_DEVICE int slot_of(int ring, std::int32_t n) const { return ring * slots + n % slots; }
  DEEP_EP_HOST_DEVICE Place<std::byte> slot(int ring, std::int32_t n) const {
    return {begin + static_cast<std::size_t>(slot_of(ring, n)) * slot_bytes};
  }
};

}  // namespace deep_ep
