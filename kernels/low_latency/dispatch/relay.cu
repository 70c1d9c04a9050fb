// By rails, for calls with hooks: hands on what ranks of other nodes send to this rank for its node. A call in one
// launch does that by itself. Between the parts of a call with a hook, however, lies whatever this rank likes to do,
// while its neighbours wait for those rows; so the send part is followed by this kernel, on a stream of its own, and
// the receive part comes after it.
//
//   main stream    send part ----- anything ----- receive part
//                       \                        /
//   own stream           ---- this kernel -------
//
// It waits for send parts alone, those of the ranks whose rows it hands on: for nobody's hook. There is room for the
// rows at all ranks of this node, as the send part has waited for that. So nothing that comes after the send part on
// any rank can hold it up, as long as it finds a multiprocessor: kernels that wait for other ranks leave some
// (room_for_relay in csrc/buffer/low_latency/plan_parts.hpp).
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/dispatch/relay.hpp"
#include "kernels/low_latency/dispatch/send.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

/// What this rank's rails in other nodes have told it.
struct RelayedCounts {
  const LowLatencyDispatchParams& params;
  const DispatchShared& shared;
  DispatchReach<true> reach;

  /// By all threads: waits for them. The block syncs after it.
  DEEP_EP_DEVICE void learn() const {
#pragma unroll 1
    for (int node = thread_index(); node < reach.num_nodes(); node += block_threads()) {
      std::uint64_t payload = 0;
      const int rail = reach.rail_in(node);
      if (node == reach.own_node() || !reach.await_count(rail, 0, payload)) continue;
      const CountHead head = CountHead::unpack(payload);
      shared.relayed[rail] = head.relayed;
      if (head.call_shape == params.call_shape) continue;
      report_fault(params.common.wait, FaultKind::mismatch, Wanted::low_latency_dispatch_counts, rail, 0,
                   params.call_shape, head.call_shape);
    }
  }

  /// By one thread, when all rows have been handed on: takes that off the counts, or the receive part would do it
  /// again.
  DEEP_EP_DEVICE void take_off() const {
#pragma unroll 1
    for (int node = 0; node < reach.num_nodes(); ++node) {
      if (node == reach.own_node()) continue;
      Cell* head = params.common.window.counts(reach.epoch, reach.rail_in(node)).in(params.common.local);
      CountHead counts = CountHead::unpack(load_cell(head).payload);
      counts.relayed = 0;
      store_cell(head, counts.packed(), reach.epoch);
    }
  }
};

DEEP_EP_DEVICE void relay_rows_body(const LowLatencyDispatchParams& params, std::byte* memory) {
  const LowLatencyParams& common = params.common;
  const LowLatencyRow row = params.row(true);
  const DispatchShared shared(Carver(memory), common.num_ranks, 0, 0, 0);

  // 1. Which call is this?
  DispatchShared::Words& words = *shared.words;
  LowLatencyRelay& calls = common.relay(LowLatencyKind::dispatch);
  if (thread_index() == 0) words.epochs.send = calls.find(common.counters(LowLatencyKind::dispatch));
#pragma unroll 1
  for (int rank = thread_index(); rank < common.num_ranks; rank += block_threads()) {
    shared.heaps[rank] = common.heaps[rank];
  }
  block::sync();
  const std::uint64_t call = words.epochs.send;
  const DispatchReach<true> reach(common, call, shared.heaps, row.bytes());
  const RelayedCounts counts{params, shared, reach};

  // 2. How many rows come?
  if (call != 0) counts.learn();
  block::sync();
  if (thread_index() == 0) words.failed = call == 0 || aborted(common.wait) ? 1 : 0;
  block::sync();

  // 3. Hand them on.
  if (words.failed == 0) {
    const Divisor& parts = params.warps_per_row;
    const int group = warp_index() / parts * grid_blocks() + block_index();
    const int groups = block_warps() / parts * grid_blocks();
    DispatchRelay<true>{params, shared, row, reach}.relay_rows(group, groups, warp_index() % parts);
  }
  block::sync();
  if (thread_index() == 0 && calls.end(call) && !aborted(common.wait)) counts.take_off();
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(relay_low_latency_rows, deep_ep::device::low_latency::relay_rows_body)
