// Plays the NIC of a rank: sees the doorbells that kernels ring, reads the entries behind them, moves what they name to
// the peers' heaps, and writes completions, as fast and as late as it is told. What a device does for the handler
// `gpu`, with the same words in the same places.
//
//   1  taker     sees a doorbell, fetches entries, finds memory by their keys, and cuts them into pieces
//   2  movers    copy the bytes of pieces, many at once
//   3  finisher  fences what was moved; when the time has come, adds, then writes the completion
//
// A fourth warp watches for the host's stop word, which is slow to read, and sees to it that a launch ends. A second
// block may help to move (simulated_lending.hpp).
//
// Order, as of a reliable connection: pieces are finished in the order in which entries were taken, so an addition is
// visible only behind the bytes before it, and a completion behind both. Bytes may come earlier, and in any order.
#include "simulation/kernels/simulated_nic.hpp"

#include "kernels/kernel_list.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/launch.hpp"
#include "simulation/kernels/simulated_finisher.hpp"
#include "simulation/kernels/simulated_lending.hpp"
#include "simulation/kernels/simulated_mover.hpp"
#include "simulation/kernels/simulated_taker.hpp"

namespace deep_ep::device::simulated {

/// By one lane, until all is finished. What was taken has as long again as the launch; then nothing waits any more.
DEEP_EP_DEVICE void watch(const SimulatedNicParams& params, PieceQueue& queue) {
  if (lane_index() != 0) return;
  const std::uint64_t begin = now_ns();
  for (int polls = 0; !queue.is_stopped(); ++polls) {
    const bool over = params.most_ns != 0 && now_ns() - begin > 2 * params.most_ns;
    if (over || load_relaxed<Scope::system>(params.stop) != 0) queue.stop();
    pause(polls);
  }
}

DEEP_EP_DEVICE void body(const SimulatedNicParams& params, std::byte* shared) {
  constexpr int kOthers = 3;  // warps that do not move
  const int mover = warp_index() - kOthers;
  const int movers = block_warps() - kOthers;
  const Shared all(Carver(shared), static_cast<std::size_t>(params.num_queues),
                   static_cast<std::size_t>(params.num_regions), static_cast<std::size_t>(movers));
  const std::size_t stage = mover < 0 ? 0 : static_cast<std::size_t>(mover) * kMoverStages;
  const RowPipe pipe{{params.mover_stages, kPieceBytes}, all.barriers + stage, all.stages + stage * kPieceBytes};
  if (mover >= 0 && lane_index() == 0) pipe.init();
  const bool helps = block_index() != 0;
  if (!helps) all.fill(params);
  const Pieces pieces(params, helps ? nullptr : &all.queue);
  block::sync();
  if (helps && thread_index() == 0) store_release<Scope::gpu>(&params.lending->helping, params.launch);
  if (mover >= 0) {
    Mover(params, pieces, pipe, mover, movers).run();
  } else if (helps) {
    return;
  } else if (warp_index() == 2) {
    watch(params, all.queue);
  } else if (warp_index() == 1) {
    Finisher(params, all.queue).run();
  } else {
    if (lane_index() == 0) store_release<Scope::system>(params.serving, params.launch);
    Taker(params, all, Lender(params, all.queue, movers)).run();
  }
}

}  // namespace deep_ep::device::simulated

DEEP_EP_DEFINE_KERNEL(simulated_nic, deep_ep::device::simulated::body)
