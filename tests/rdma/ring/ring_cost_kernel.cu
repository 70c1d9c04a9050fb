#include "tests/rdma/ring/ring_cost_kernel.hpp"

#include "kernels/primitives/warp.hpp"
#include "kernels/rdma/peer.hpp"

namespace deep_ep::device {
namespace {

using test::RingCostParams;

template <class Group>
DEEP_EP_DEVICE void measure(const RingCostParams& p) {
  constexpr bool kAlone = std::is_same_v<Group, OneThread>;
  rdma::RdmaPeer<Group> queue(p.peer, p.wait);
  std::int64_t writing = 0, ringing = 0, polling = 0;
  for (int round = 0; round < p.rounds; ++round) {
    const auto first = static_cast<std::uint64_t>(round) * RingCostParams::kRows;
    const std::int64_t begin = clock_cycles();
    bool good = true;
    for (int row = kAlone ? 0 : lane_index(); row < RingCostParams::kRows; row += kAlone ? 1 : kWarpSize) {
      const std::uint64_t at = (first + static_cast<std::uint64_t>(row)) * RingCostParams::kRowBytes;
      good = good && queue.put(at, at, RingCostParams::kRowBytes);
    }
    const std::int64_t written = clock_cycles();
    queue.flush();
    const std::int64_t rung = clock_cycles();
    if (lane_index() == 0) {
      const std::uint32_t tail = rdma::tail_word(queue.posted() - 1, rdma::kCompletionOk);
      store_release<Scope::system>(&p.completion->tail, tail);
    }
    if (!kAlone) warp::sync();
    const std::int64_t answered = clock_cycles();
    good = good && queue.wait_for(queue.posted());
    polling += clock_cycles() - answered;
    writing += written - begin;
    ringing += rung - written;
    if (!good) break;
  }
  queue.close();
  if (lane_index() != 0) return;
  p.cycles[0] = writing;
  p.cycles[1] = ringing;
  p.cycles[2] = polling;
}

DEEP_EP_DEVICE void ring_cost_body(const RingCostParams& p, std::byte*) {
  if (!p.one_thread) return measure<WholeWarp>(p);
  if (lane_index() == 0) measure<OneThread>(p);
}

}  // namespace
}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(ring_cost, deep_ep::device::ring_cost_body)
