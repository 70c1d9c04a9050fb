// The warps of a simulated NIC that copy: mover i of n takes the pieces i, i + n, i + 2n, ...
#pragma once

#include "kernels/rdma/simulated_pieces.hpp"

namespace deep_ep::device::simulated {

/// By a warp; `bytes` at most kPieceBytes. Any alignment, but 16 bytes at a time only where both have the same.
DEEP_EP_DEVICE void copy_piece(std::byte* to, const std::byte* from, std::uint32_t bytes) {
  constexpr int kAtOnce = kPieceBytes / sizeof(Vec16) / kWarpSize;
  const auto target = reinterpret_cast<std::uintptr_t>(to);
  const auto source = reinterpret_cast<std::uintptr_t>(from);
  const bool by_vectors = (target ^ source) % 16 == 0;
  const bool by_words = (target ^ source) % 4 == 0;
  const std::uint32_t unit = by_vectors ? 16 : by_words ? 4 : 1;
  const auto skipped = static_cast<std::uint32_t>(-target) % unit;
  const std::uint32_t head = skipped < bytes ? skipped : bytes;
  const std::uint32_t units = (bytes - head) / unit;
  const std::uint32_t tail = head + units * unit;
  const auto lane = static_cast<std::uint32_t>(lane_index());
  for (std::uint32_t i = lane; i < head; i += kWarpSize) to[i] = from[i];
  for (std::uint32_t i = tail + lane; i < bytes; i += kWarpSize) to[i] = from[i];
  if (by_vectors) {
    const auto* in = reinterpret_cast<const Vec16*>(from + head);
    auto* out = reinterpret_cast<Vec16*>(to + head);
    Vec16 held[kAtOnce];
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      if (lane + i * kWarpSize < units) held[i] = load_weak(in + lane + i * kWarpSize);
    }
#pragma unroll
    for (std::uint32_t i = 0; i < kAtOnce; ++i) {
      if (lane + i * kWarpSize < units) store_stream(out + lane + i * kWarpSize, held[i]);
    }
  } else if (by_words) {
    const auto* in = reinterpret_cast<const std::uint32_t*>(from + head);
    auto* out = reinterpret_cast<std::uint32_t*>(to + head);
    for (std::uint32_t i = lane; i < units; i += kWarpSize) store_stream(out + i, load_weak(in + i));
  } else {
    for (std::uint32_t i = lane; i < units; i += kWarpSize) to[head + i] = from[head + i];
  }
}

/// Moves the pieces mover, mover + movers, ... until the last one.
DEEP_EP_DEVICE void move_pieces(const SimulatedNicParams& params, PieceQueue& queue, int mover, int movers) {
  for (auto number = static_cast<std::uint64_t>(mover);; number += static_cast<std::uint64_t>(movers)) {
    const auto enough = [&](std::uint64_t head) {
      return (head & ~PieceQueue::kEnd) > number || (head & PieceQueue::kEnd) != 0;
    };
    const std::uint64_t head = wait_for_word(&queue.head, enough);
    if ((head & ~PieceQueue::kEnd) <= number) return;
    const Piece& piece = queue.piece(number);
    if (params.speed.reorder_ns != 0 && piece.bytes != 0) {
      const std::uint64_t until = now_ns() + scattered(number, params.speed.reorder_ns);
      for (int spins = 1; now_ns() < until && !queue.is_stopped(); ++spins) pause(spins);
    }
    copy_piece(piece.to, piece.from, piece.bytes);
    warp::sync();
    if (lane_index() == 0) store_release<Scope::block>(&queue.moved_of(number), number + 1);
  }
}

}  // namespace deep_ep::device::simulated
