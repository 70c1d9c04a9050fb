// The warps of a simulated NIC that copy: mover i of n in a block takes the pieces i, i + n, i + 2n, ...
#pragma once

#include "simulation/kernels/simulated_lending.hpp"

namespace deep_ep::device::simulated {

/// By a warp. Any alignment, but 16 bytes at a time only where both have the same. Of a whole piece all loads are under
/// way at once.
DEEP_EP_DEVICE void copy_piece(std::byte* to, const std::byte* from, std::uint32_t bytes) {
  constexpr std::uint32_t kRow = 16 * kWarpSize, kRows = kPieceBytes / kRow;
  const auto target = reinterpret_cast<std::uintptr_t>(to);
  const bool alike = (target ^ reinterpret_cast<std::uintptr_t>(from)) % 16 == 0;
  const std::uint32_t skipped = static_cast<std::uint32_t>(-target) % 16;
  const std::uint32_t head = alike && skipped < bytes ? skipped : bytes;
  const std::uint32_t end = head + (bytes - head) / 16 * 16;
  const auto lane = static_cast<std::uint32_t>(lane_index());
  for (std::uint32_t i = lane; i < head; i += kWarpSize) to[i] = from[i];
  const std::uint32_t first = head + 16 * lane;
  Vec16 rows[kRows];
#pragma unroll
  for (std::uint32_t row = 0; row < kRows; ++row) {
    const std::uint32_t i = first + row * kRow;
    if (i < end) rows[row] = load_weak(reinterpret_cast<const Vec16*>(from + i));
  }
#pragma unroll
  for (std::uint32_t row = 0; row < kRows; ++row) {
    const std::uint32_t i = first + row * kRow;
    if (i < end) store_stream(reinterpret_cast<Vec16*>(to + i), rows[row]);
  }
  for (std::uint32_t i = end + lane; i < bytes; i += kWarpSize) to[i] = from[i];
}

/// By a warp: moves the pieces mover, mover + movers, mover + 2 * movers, ... until the last one.
DEEP_EP_DEVICE void move_pieces(const SimulatedNicParams& params, const Pieces& pieces, int mover, int movers) {
  std::uint64_t known = 0;  // pieces that it may move
  for (std::uint64_t number = pieces.first() + static_cast<std::uint64_t>(mover);;
       number += static_cast<std::uint64_t>(movers)) {
    if (number >= known) known = pieces.await(number);
    if (number >= known) return;
    const Piece& piece = pieces[number];
    if (pieces.is_lent(piece)) continue;
    if (params.speed.reorder_ns != 0 && piece.bytes != 0) {
      const std::uint64_t until = now_ns() + scattered(number, params.speed.reorder_ns);
      for (int spins = 1; now_ns() < until && !pieces.is_stopped(); ++spins) pause(spins);
    }
    copy_piece(piece.to, piece.from, piece.bytes);
    warp::sync();
    if (lane_index() == 0) pieces.tell_moved(number);
  }
}

}  // namespace deep_ep::device::simulated
