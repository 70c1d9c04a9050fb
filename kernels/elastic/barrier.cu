// A barrier of the ranks of one node, in stream order.
#include "kernels/common/wait.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/normal/node.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device {

/// One block.
DEEP_EP_DEVICE void barrier_body(const IntranodeParams& common, std::byte*) {
  const Call call = Call::begin(common.state->barrier, common.wait);
  const int peers = call.begun ? common.num_ranks : 0;
  block::each(peers, [&](int peer) {
    store_release<Scope::system>(common.signal_to(peer, IntranodeSignal::barrier), call.epoch);
  });
  block::each(peers, [&](int peer) {
    wait_signal(common.wait, common.signal_from(peer, IntranodeSignal::barrier), {peer, Wanted::barrier, call.epoch});
  });
  call.end([] {});
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(barrier, deep_ep::device::barrier_body)
