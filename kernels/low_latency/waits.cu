// How long low-latency calls wait for each rank: launched around receive parts, and only where somebody has asked for
// it. So the kernels of calls stay as they are.
//
// Combine measures its waits exactly, as a warp polls for the rows of several ranks. In dispatch the threads of a warp
// wait for the counts of different ranks, and on GPUs all go on when the last one has its own: so `listen` waits before
// dispatch's receive part does, and looks at the clock as each rank comes.
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/params.hpp"
#include "kernels/low_latency/peers.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

/// Have the counts of `source`, or what precedes them from far, come?
DEEP_EP_DEVICE bool counts_came(const LowLatencyParams& common, std::uint64_t epoch, int source) {
  const LowLatencyWindow& window = common.window;
  if (!Topology<true>{common}.is_far(source)) {
    return load_cell(window.counts(epoch, source).in(common.local)).epoch >= epoch;
  }
  const std::uint64_t* progress = window.progress(LowLatencyKind::dispatch, epoch, source, 0).in(common.local);
  return load_acquire<Scope::system>(progress) >= LowLatencyMailbox::progress_value(epoch, 0);
}

/// A lane listens for a rank. All lanes of a warp go round together, so that none waits for another one's rank.
DEEP_EP_DEVICE void listen(const LowLatencyWaitsParams& params) {
  const LowLatencyParams& common = params.common;
  const std::uint64_t epoch = common.counters(LowLatencyKind::dispatch).received.epoch();
  for (int first = warp_index() * kWarpSize; first < common.num_ranks; first += block_threads()) {
    const int source = first + lane_index();
    const bool listens = source < common.num_ranks && !masked(common, source);
    bool came = !listens;
    std::int64_t cycles = 0;
    const std::int64_t begin = clock_cycles();
    const auto all_came = [&](const Poll&) {
      if (!came) {
        came = counts_came(common, epoch, source);
        cycles = clock_cycles() - begin;
      }
      return warp::all(came);
    };
    poll_until(all_came, [&](const Poll& poll) {
      return warp::any(aborted(common.wait) || now_ns() - poll.begin > params.patience_ns);
    });
    if (listens) params.heard[source] = {cycles, came ? 1 : 0};
  }
}

/// By all threads: for each rank, how many tokens of this one have a selection there.
DEEP_EP_DEVICE void count_tokens(const LowLatencyWaitsParams& params, std::uint32_t* tokens_of) {
  const int num_experts = params.num_local_experts * params.common.num_ranks;
  for (int token = thread_index(); token < params.num_tokens; token += block_threads()) {
    const auto rank_of = [&](int k) {
      const int expert = expert_of(params.topk_idx.load_cached(std::int64_t{token} * params.num_topk + k), num_experts);
      return expert < 0 ? -1 : expert / params.num_local_experts;
    };
    for (int k = 0; k < params.num_topk; ++k) {
      const int rank = rank_of(k);
      bool first = rank >= 0;
      for (int before = 0; first && before < k; ++before) first = rank_of(before) != rank;
      if (first) add_relaxed<Scope::block>(tokens_of + rank, 1);
    }
  }
}

/// By all threads: adds what the call has cost. In combine, a call has waited for a rank as long as one of its blocks
/// has, on average over those with tokens for that rank.
DEEP_EP_DEVICE void add(const LowLatencyWaitsParams& params, std::uint32_t* tokens_of) {
  const LowLatencyParams& common = params.common;
  const bool combines = params.kind == LowLatencyKind::combine;
  if (combines) {
    for (int rank = thread_index(); rank < common.num_ranks; rank += block_threads()) tokens_of[rank] = 0;
    block::sync();
    count_tokens(params, tokens_of);
    block::sync();
  }
  const bool over = aborted(common.wait);
  for (int source = thread_index(); source < common.num_ranks; source += block_threads()) {
    const LowLatencyHeard heard = params.heard[source];
    std::int64_t cycles = heard.cycles + (heard.came != 0 ? 0 : params.cost[source]);
    params.cost[source] = 0;
    params.heard[source] = {};
    if (params.given != nullptr) params.given[source] += cycles;
    bool counts = !over && !masked(common, source);
    if (combines) {
      const auto tokens = static_cast<int>(load_relaxed<Scope::block>(tokens_of + source));
      counts = counts && (tokens != 0 || cycles != 0);
      const int blocks = tokens < params.blocks ? tokens : params.blocks;
      if (blocks > 1) cycles /= blocks;
    }
    if (!counts) continue;
    LowLatencyWaited& waited = params.waited[source];
    ++waited.calls;
    waited.cycles += cycles;
    if (cycles > waited.longest) waited.longest = cycles;
  }
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

DEEP_EP_DEVICE void waits_body(const LowLatencyWaitsParams& params, std::byte* memory) {
  switch (params.step) {
    case LowLatencyWaitsStep::listen:
      return listen(params);
    case LowLatencyWaitsStep::add:
      return add(params, reinterpret_cast<std::uint32_t*>(memory));
    case LowLatencyWaitsStep::clock:
      if (thread_index() == 0) measure_clock(params.clock);
  }
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(add_waits_low_latency, deep_ep::device::low_latency::waits_body)
