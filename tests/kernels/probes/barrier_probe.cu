// Every thread writes a word, reads two others', in turn with block::sync, a named barrier per pair of warps, and a
// pair of producer and consumer barriers.
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/warp.hpp"
#include "tests/kernels/probes/probes.hpp"

namespace deep_ep::device {
namespace {

DEEP_EP_DEVICE void barrier_probe(const probes::BarrierParams& p, std::byte* shared) {
  auto* words = reinterpret_cast<std::uint32_t*>(shared);
  const int pair = warp_index() / 2;
  const int pair_barrier = 1 + pair;
  const int full = 5 + pair;
  const int empty = 9 + pair;
  const bool producer = warp_index() % 2 == 0;
  std::uint32_t sum = 0;
  for (int round = 1; round <= p.rounds; ++round) {
    const auto mine = static_cast<std::uint32_t>(round * (thread_index() + 1));
    words[thread_index()] = mine;
    block::sync();
    sum += words[(thread_index() + block_threads() / 2) % block_threads()];
    block::sync();
    words[thread_index()] = mine;
    block::sync(pair_barrier, 64);
    sum += words[thread_index() ^ 32];
    block::sync(pair_barrier, 64);
    if (producer) {
      words[thread_index()] = mine + 1;
      block::arrive(full, 64);
      block::sync(empty, 64);
    } else {
      block::sync(full, 64);
      sum += words[thread_index() - 32];
      block::arrive(empty, 64);
    }
    block::sync();
  }
  p.sums[thread_index()] = sum;
}

}  // namespace
}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(barrier_probe, deep_ep::device::barrier_probe)
