// How ranks begin and end a load-balance call. No rank's slots are written, and none of its gradients read, before that
// rank has reached the call; and no rank goes on before all ranks have done their part.
#pragma once

#include "kernels/common/row_comparison.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/load_balance/params.hpp"
#include "kernels/primitives/bulk.hpp"

namespace deep_ep::device {

/// By all threads of the block: tells all ranks that this one has come, and waits for them. False after a fault, in all
/// threads.
DEEP_EP_DEVICE bool meet(const LoadBalanceParams& params, const Call& call) {
  const IntranodeParams& common = params.common;
  const ControlWindow& control = common.control;
  bool good = call.begun;
  for (int peer = thread_index(); peer < common.num_ranks && good && block_index() == 0; peer += block_threads()) {
    Mailbox<LoadBalanceCall>& box = control.load_balance_box(common.heaps[peer], common.rank);
    box.message.shape = params.shape;
    store_release<Scope::system>(&box.signal, call.epoch);
  }
  for (int peer = thread_index(); peer < common.num_ranks && call.begun; peer += block_threads()) {
    const Mailbox<LoadBalanceCall>& box = control.load_balance_box(common.own_heap(), peer);
    const Awaited arrival{params.first_rank + peer, Wanted::load_balance_call, call.epoch};
    if (!wait_signal(params.wait, &box.signal, arrival)) {
      good = false;
      continue;
    }
    RowComparison shapes;
    shapes.compare(RowField::kind, static_cast<std::int64_t>(params.shape),
                   static_cast<std::int64_t>(box.message.shape));
    const std::uint64_t* own = &control.load_balance_box(common.own_heap(), common.rank).signal;
    good = shapes.agrees(params.wait, own, params.first_rank + common.rank, arrival) && good;
  }
  bulk::fence_global();  // the peers' signals also allow bulk stores into their slots
  return whole_block(good, call.scratch);
}

/// By all threads of the block, when its part is done, bulk copies included. The last block tells all ranks, and waits
/// until they are done, too.
DEEP_EP_DEVICE void leave_together(const LoadBalanceParams& params, const Call& call, bool good) {
  const IntranodeParams& common = params.common;
  call.end([&] {
    // After a fault in another block its pieces are missing, and no peer may take them for moved.
    const bool done = good && !aborted(params.wait);
    for (int peer = thread_index(); peer < common.num_ranks && done; peer += block_threads()) {
      store_release<Scope::system>(common.signal_to(peer, IntranodeSignal::load_balance_done), call.epoch);
    }
    for (int peer = thread_index(); peer < common.num_ranks && done; peer += block_threads()) {
      wait_signal(params.wait, common.signal_from(peer, IntranodeSignal::load_balance_done),
                  {params.first_rank + peer, Wanted::load_balance_done, call.epoch});
    }
    if (thread_index() == 0) store_relaxed<Scope::gpu>(&common.state->load_balance_next_piece, std::uint32_t{0});
  });
}

}  // namespace deep_ep::device
