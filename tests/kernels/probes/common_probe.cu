#include "tests/kernels/probes/common_probe.hpp"

#include "kernels/common/wait.hpp"
#include "kernels/normal/transfer.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/memory.hpp"

namespace deep_ep::device {
namespace {

DEEP_EP_DEVICE void wait_probe(const probes::WaitParams& p, std::byte*) {
  const Awaited awaited{3, Wanted::counts, p.expected};
  bool arrived = false;
  if (warp_index() == 2) {
    if (p.value == 0 || lane_index() != 0) return;
    *p.payload = 42;
    return store_release<Scope::system>(p.signal, p.value);
  }
  if (warp_index() == 0) {
    arrived = wait_signal<WholeWarp>(p.wait, p.signal, awaited);
  } else if (lane_index() == 0) {
    arrived = wait_signal(p.wait, p.signal, awaited);
  } else {
    return;
  }
  p.returned[thread_index()] = !arrived ? 1 : load_weak(p.payload) == 42 ? 2 : 3;
}

DEEP_EP_DEVICE void call_probe(const probes::CallParams& p, std::byte*) {
  const Call call = Call::begin(*p.counter, p.wait);
  if (thread_index() == 0) p.epochs[block_index()] = call.begun ? call.epoch : 0;
  call.end([&] {
    if (thread_index() == 0) *p.finished += 1;
  });
}

DEEP_EP_DEVICE void serve_probe(const probes::ServeParams& p, std::byte* shared) {
  const NodeGrid grid{.rank = 0, .num_ranks = 3, .width = {}};  // each rank is a node
  TransferParams params{};
  params.common.wait = p.wait;
  const normal::Transfer transfer{params, 1, reinterpret_cast<std::int32_t*>(shared)};
  const bool good = transfer.serve(
      grid.others(), 0, 1, [](int) { return 1; },
      [&](int number, int) {
        return normal::AwaitedWord{{grid.other(number), Wanted::internode_rows, 1}, p.never};
      },
      [](int, int) { return true; });
  p.returned[lane_index()] = good ? 2 : 1;
}

DEEP_EP_DEVICE void whole_block_probe(const probes::WholeBlockParams& p, std::byte*) {
  const bool all = block::all(thread_index() != p.odd);
  p.returned[thread_index()] = all ? 1 : 0;
}

}  // namespace
}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(wait_probe, deep_ep::device::wait_probe)
DEEP_EP_DEFINE_KERNEL(call_probe, deep_ep::device::call_probe)
DEEP_EP_DEFINE_KERNEL(serve_probe, deep_ep::device::serve_probe)
DEEP_EP_DEFINE_KERNEL(whole_block_probe, deep_ep::device::whole_block_probe)
