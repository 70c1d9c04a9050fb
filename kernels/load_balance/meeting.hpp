// How ranks begin and end a load-balance call. No rank's slots are written, and none of its gradients read, before that
// rank has reached the call; and no rank goes on before all ranks have done their part.
#pragma once

#include "kernels/common/tickets.hpp"
#include "kernels/load_balance/params.hpp"
#include "kernels/normal/meet.hpp"
#include "kernels/primitives/bulk.hpp"

namespace deep_ep::device {

/// By all threads of the block: tells all ranks that this one has come, and waits for them. False after a fault, in all
/// threads.
DEEP_EP_DEVICE bool meet(const LoadBalanceParams& params, const Call& call) {
  const Meeting<ReportLate> meeting{params.common, {params.wait},    Wanted::load_balance_call, 3,
                                    call.epoch,    params.first_rank};
  const Arrival ours{.kind = params.shape};
  if (call.begun && block_index() == 0) meeting.announce(ours);
  const bool good = call.begun && meeting.hear_all(ours);
  fence<Scope::system>();  // gradients that peers had written before are read by ordinary loads
  bulk::fence_global();    // the peers' signals also allow bulk stores into their slots
  return block::all(good);
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
