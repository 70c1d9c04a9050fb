// Gradients of replicas are added to those of this rank's experts, in fp32, in the order of ranks and slots.
//
// A warp holds a piece of an expert's gradients in registers and adds the same piece of each replica to it. It loads
// from other ranks' memory by ordinary loads, many at once: bulk loads from a peer are slower (results/measurements/).
#include "kernels/kernel_list.hpp"
#include "kernels/load_balance/exchange.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/numeric.hpp"

namespace deep_ep::device {

/// A piece of gradients: a whole warp's registers.
struct GradPiece {
  static constexpr int kVectors = kGradPieceBytes / (kWarpSize * sizeof(Vec16));  ///< of a lane

  Vec16 vector[kVectors];

  DEEP_EP_DEVICE void load(const std::byte* from, std::uint32_t bytes) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const auto at = static_cast<std::uint32_t>(lane_index() + v * kWarpSize) * sizeof(Vec16);
      vector[v] = {};
      if (at < bytes) vector[v] = load_weak(reinterpret_cast<const Vec16*>(from + at));
    }
  }
  DEEP_EP_DEVICE void add(const GradPiece& other) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        std::uint32_t& word = vector[v].word[i];
        word = bits_of(float_from_bits(word) + float_from_bits(other.vector[v].word[i]));
      }
    }
  }
  DEEP_EP_DEVICE void store(std::byte* to, std::uint32_t bytes) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const auto at = static_cast<std::uint32_t>(lane_index() + v * kWarpSize) * sizeof(Vec16);
      if (at < bytes) store_stream(reinterpret_cast<Vec16*>(to + at), vector[v]);
    }
  }
};

/// By a whole warp.
DEEP_EP_DEVICE void pull_grads(const LoadBalanceParams& params) {
  std::uint32_t* const next = &params.common.state->next_piece;
  ReplicatedPieces pieces{params};
  ExpertPiece piece = pieces.take();
  while (piece.exists()) {
    // The ticket is not needed before this piece is done.
    const std::uint32_t ticket = lane_index() == 0 ? fetch_add_relaxed<Scope::gpu>(next, std::uint32_t{1}) : 0;
    GradPiece sum;
    sum.load(piece.own(), piece.bytes);
    for (int place = pieces.find(piece.expert, 0); place >= 0; place = pieces.find(piece.expert, place + 1)) {
      GradPiece replica;
      replica.load(params.slot(*piece.payload, place) + piece.offset, piece.bytes);
      sum.add(replica);
    }
    sum.store(piece.own(), piece.bytes);
    piece = pieces.piece(warp::shuffle(ticket, 0));
  }
}

DEEP_EP_DEVICE void reduce_grads_body(const LoadBalanceParams& params, std::byte*) {
  exchange(params, [&] { pull_grads(params); });
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(reduce_grads, deep_ep::device::reduce_grads_body)
