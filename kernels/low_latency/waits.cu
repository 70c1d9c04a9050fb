// How long low-latency calls wait for each rank: launched behind receive parts, and only where somebody has asked for
// it. So the kernels of calls stay as they are.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/params.hpp"
#include "kernels/low_latency/peers.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

/// By all threads: adds what the call has cost. It has waited for a rank as long as one of its blocks has, on average.
DEEP_EP_DEVICE void add(const LowLatencyWaitsParams& params) {
  const LowLatencyParams& common = params.common;
  const bool over = aborted(common.wait);
  block::each(common.num_ranks, [&](int source) {
    std::int64_t cycles = params.cost[source];
    params.cost[source] = 0;
    if (params.given != nullptr) params.given[source] += cycles;
    if (over || masked(common, source)) return;
    cycles /= params.blocks;
    LowLatencyWaited& waited = params.waited[source];
    ++waited.calls;
    waited.cycles += cycles;
    if (cycles > waited.longest) waited.longest = cycles;
  });
}

/// By one thread.
DEEP_EP_DEVICE void measure_clock(std::int64_t* clock) {
  constexpr std::uint64_t kLongEnoughNs = 20'000;
  const std::uint64_t begin_ns = now_ns();
  const std::int64_t begin = clock_cycles();
  std::uint64_t ns = 0;
  do ns = now_ns() - begin_ns;
  while (ns < kLongEnoughNs);
  clock[0] = clock_cycles() - begin;
  clock[1] = static_cast<std::int64_t>(ns);
}

DEEP_EP_DEVICE void waits_body(const LowLatencyWaitsParams& params, std::byte*) {
  if (params.clock == nullptr) return add(params);
  if (thread_index() == 0) measure_clock(params.clock);
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(add_waits_low_latency, deep_ep::device::low_latency::waits_body)
