// The rings that rows cross the network through: for each other node a landing ring, which this rank's rail there
// writes, and a staging ring, which this rank's NIC reads.
//
// A ring is a row of equal chunks, a chunk a few slots, a slot one row with all that belongs to it. Chunk c of a call
// takes the place of chunk c - chunks; none wraps, so a chunk is one RDMA write. Every call divides the same memory by
// its own row size: a ring is written in a call only when its reader has read all rows of the call before.
//
// Chunks take the lanes to a rail in turn: chunk c is number c / lanes of lane c % lanes. A ring has equally many
// chunks of each, so chunk c takes the place of one of its own lane.
#pragma once

#include <cstdint>

#include "kernels/common/limits.hpp"
#include "kernels/common/place.hpp"
#include "kernels/primitives/divisor.hpp"

namespace deep_ep {

struct Rings {
  static constexpr int kMostChunks = 256;                          ///< of a ring: each has counters
  static constexpr int kRows = 16;                                 ///< of a chunk, where there is room
  static constexpr int kShareRows = 2;                             ///< of a chunk, that a relay takes at once
  static constexpr std::size_t kMostBytes = std::size_t{1} << 30;  ///< of a chunk of several rows: one RDMA write

  std::size_t begin = 0;       ///< offset in the heap: landing rings, then staging rings
  std::size_t ring_bytes = 0;  ///< whole lines
  int others = 0;              ///< other nodes
  std::uint32_t slot_bytes = 0;
  Divisor chunk_rows = 1;
  Divisor chunks = 0;
  Divisor shares = 1;  ///< of a chunk
  Divisor lanes = 1;   ///< that a call's chunks take: a power of two; a ring holds two chunks of each, or more

  /// For rows of `row_bytes`, all included, in memory of `bytes` bytes. chunks is 0 where two do not fit. `lanes`:
  /// there are so many; fewer are taken where a ring does not hold two chunks of each.
  static Rings make(std::size_t begin, std::size_t bytes, int others, std::size_t row_bytes, int lanes = 1) {
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
    const int chunks = fit < 2 ? 0 : fit > kMostChunks ? kMostChunks : static_cast<int>(fit);
    while (lanes > 1 && chunks < 2 * lanes) lanes /= 2;
    rings.chunk_rows = rows;
    rings.shares = (rows + kShareRows - 1) / kShareRows;
    rings.chunks = chunks - chunks % lanes;
    rings.lanes = lanes;
    return rings;
  }

  DEEP_EP_HOST_DEVICE int chunk_of(int row) const { return row / chunk_rows; }
  DEEP_EP_HOST_DEVICE int chunks_for(int rows) const { return (rows + chunk_rows - 1) / chunk_rows; }
  /// Rows of chunk `chunk` where there are `rows` in all.
  DEEP_EP_HOST_DEVICE int rows_in(int chunk, int rows) const {
    const int rest = rows - chunk * chunk_rows;
    return rest < chunk_rows ? rest : int{chunk_rows};
  }
  // Of lanes.
  DEEP_EP_HOST_DEVICE int lane_of(int chunk) const { return chunk & (lanes - 1); }
  DEEP_EP_HOST_DEVICE int in_lane(int chunk) const { return chunk / lanes; }
  DEEP_EP_HOST_DEVICE int chunk_in(int lane, int number) const { return number * lanes + lane; }
  /// Chunks of a lane where there are `rows` rows in all.
  DEEP_EP_HOST_DEVICE int chunks_for(int rows, int lane) const {
    return lane < lanes ? (chunks_for(rows) + lanes - 1 - lane) / lanes : 0;
  }
  /// The counter of a chunk, of one node's.
  DEEP_EP_HOST_DEVICE int counter(int number, int chunk) const { return number * kMostChunks + chunk % chunks; }

  /// Of other node `number`.
  DEEP_EP_HOST_DEVICE Place<std::byte> landing(int number, int row) const { return slot(number, row); }
  DEEP_EP_HOST_DEVICE Place<std::byte> staging(int number, int row) const { return slot(others + number, row); }

  /// How far a ring has come: `chunks` chunks of call number `call` (from 0), and all of the calls before.
  DEEP_EP_HOST_DEVICE static constexpr std::uint64_t progress(std::uint64_t call, int chunks) {
    return call << 32 | static_cast<std::uint64_t>(chunks);
  }
  /// How many chunks of that call there are in a word that says `seen`. All of them, where it belongs to a later call:
  /// the rail goes on when its rows have been read, which does not take warps whose share of the last chunk has no row.
  DEEP_EP_HOST_DEVICE static constexpr int chunks_of_call(std::uint64_t call, std::uint64_t seen) {
    constexpr std::uint64_t kAll = INT32_MAX / (2 * kRows);
    const std::uint64_t of_call = progress(call, 0);
    if (seen <= of_call) return 0;
    return static_cast<int>(seen - of_call < kAll ? seen - of_call : kAll);
  }
  /// What must have been read of a lane before its chunk `chunk` may be written, where the ring holds `chunks` of it.
  DEEP_EP_HOST_DEVICE static constexpr std::uint64_t room_for(std::uint64_t call, int chunk, int chunks) {
    return progress(call, chunk < chunks ? 0 : chunk + 1 - chunks);
  }

 private:
  DEEP_EP_HOST_DEVICE Place<std::byte> slot(int ring, int row) const {
    const int at = chunk_of(row) % chunks * chunk_rows + row % chunk_rows;
    return {begin + static_cast<std::size_t>(ring) * ring_bytes + static_cast<std::size_t>(at) * slot_bytes};
  }
};

}  // namespace deep_ep
