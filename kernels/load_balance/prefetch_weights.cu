// Weights of this rank's experts go to the slots of other ranks that hold replicas of them.
//
// A warp loads a piece of an expert once and stores it into all of the expert's slots, while its next piece loads.
#include "kernels/common/row_pipe.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/load_balance/exchange.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device {

/// By a whole warp. Afterwards all that it has stored is there.
DEEP_EP_DEVICE void push_weights(const LoadBalanceParams& params, RowPipe pipe) {
  ReplicatedPieces pieces{params};
  const auto load = [&](const ExpertPiece& piece) {
    if (piece.exists()) pipe.load(piece.own(), piece.bytes);
  };
  ExpertPiece piece = pieces.take();
  load(piece);
  while (piece.exists()) {
    const ExpertPiece next = pieces.take();
    load(next);
    // Each lane stores to the slots that it finds, so that the stores are issued side by side.
    pipe.store(piece.bytes, [&](auto store) {
      for (int place = lane_index(); place < params.common.num_ranks * params.num_slots; place += kWarpSize) {
        if (pieces.holds(place, piece.expert)) store(params.slot(*piece.payload, place) + piece.offset);
      }
    });
    piece = next;
  }
  bulk::wait(0);
  bulk::fence_global();
}

DEEP_EP_DEVICE void prefetch_weights_body(const LoadBalanceParams& params, std::byte* memory) {
  const WarpStages shared(Carver(memory), block_warps(), {kPrefetchStages, params.piece_bytes});
  const RowPipe pipe = shared.pipe(warp_index());
  if (lane_index() == 0) pipe.init();
  exchange(params, [&] { push_weights(params, pipe); });
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(prefetch_weights, deep_ep::device::prefetch_weights_body)
