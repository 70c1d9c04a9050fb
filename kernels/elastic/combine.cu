// Combine of the second interface: for each token of this rank, the sum of the rows that the ranks of its experts hold.
//
// A rank adds up its rows of a token first and pushes the rounded sum, once over NVLink, into the owner's window; or it
// pushes each row, if there is to be one rounding only. The owner adds while rows arrive. It makes no difference where
// x lies or how much of the heap is in use.
#include "kernels/common/row_comparison.hpp"
#include "kernels/elastic/combine_add.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device {

/// What must be equal on all ranks for windows to be laid out alike: see RowField::kind.
DEEP_EP_DEVICE std::int32_t kind_of(const ElasticCombineParams& params) {
  return (params.weighted ? 1 : 0) + (params.each_selection ? 2 : 0);
}

/// Tells `peer` that this rank has come, so that its window is free, and with which rows.
DEEP_EP_DEVICE void announce(const ElasticCombineParams& params, std::uint64_t epoch, int peer) {
  const IntranodeParams& common = params.common;
  Mailbox<CombineAddresses>& box = common.control.combine_box(common.heaps[peer], epoch, common.rank);
  box.message = {};
  box.message.row_bytes = params.row_bytes;
  box.message.num_topk = params.num_topk;
  box.message.max_tokens = params.max_tokens;
  box.message.kind = kind_of(params);
  store_release<Scope::system>(&box.signal, epoch);
}

/// Waits until `rank` has announced itself, and compares its rows with ours. False after a fault.
DEEP_EP_DEVICE bool hear(const ElasticCombineParams& params, std::uint64_t epoch, int rank) {
  const IntranodeParams& common = params.common;
  const Mailbox<CombineAddresses>& box = common.control.combine_box(common.own_heap(), epoch, rank);
  const Awaited addresses{rank, Wanted::combine_addresses, epoch};
  if (!wait_signal(ReportLateHere{{params.wait}}, &box.signal, addresses)) return false;
  RowComparison rows_of_both;
  rows_of_both.compare(RowField::row_bytes, params.row_bytes, box.message.row_bytes);
  rows_of_both.compare(RowField::num_topk, params.num_topk, box.message.num_topk);
  rows_of_both.compare(RowField::max_tokens, params.max_tokens, box.message.max_tokens);
  rows_of_both.compare(RowField::kind, kind_of(params), box.message.kind);
  const std::uint64_t* own = &common.control.combine_box(common.own_heap(), epoch, common.rank).signal;
  return rows_of_both.agrees(params.wait, own, common.rank, addresses);
}

/// Meets the other ranks, whose windows are then free, and pushes. False after a fault.
DEEP_EP_DEVICE bool meet_and_push(const ElasticCombineParams& params, const ElasticCombineShared& shared,
                                  std::uint64_t epoch) {
  ElasticPusher pusher(params, shared, epoch);
  bool good = true;
  for (int peer = thread_index(); peer < params.common.num_ranks; peer += block_threads()) {
    good = hear(params, epoch, peer) && good;
  }
  good = whole_block(good, shared.scratch);
  if (good) pusher.push_all();
  return good;
}

DEEP_EP_DEVICE void combine_elastic_body(const ElasticCombineParams& params, std::byte* memory) {
  const IntranodeParams& common = params.common;
  const ElasticCombineShared shared(Carver(memory), common.num_ranks);
  for (int team = thread_index(); team < static_cast<int>(ElasticCombineShared::kMostShared); team += block_threads()) {
    shared.arrived[team] = 0;
  }
  for (int rank = thread_index(); rank < common.num_ranks; rank += block_threads()) {
    const std::int32_t end = load_weak(params.source_ends + rank);
    const auto rows = static_cast<std::int32_t>(params.metadata.valid());
    shared.source_ends[rank] = end < rows ? end : rows;
  }
  const Call call = Call::begin(common.state->combine, params.wait, shared.scratch);
  if (call.begun) {
    // 1. This rank's window is free: the call before has ended here.
    for (int peer = thread_index(); peer < common.num_ranks && block_index() == 0; peer += block_threads()) {
      announce(params, call.epoch, peer);
    }
    // 2. Some warps push, and then all add. Blocks that only add need no word of others but their rows' flags.
    if (block_index() >= params.pushing_blocks || meet_and_push(params, shared, call.epoch)) {
      ElasticAdder{params, call.epoch}.add_all();
    }
  }
  call.end<Scope::gpu>([&] {
    if (thread_index() != 0) return;
    store_relaxed<Scope::gpu>(&common.state->combine_next_part, std::uint32_t{0});
    store_relaxed<Scope::gpu>(&common.state->elastic_next_row, std::uint32_t{0});
  });
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(combine_elastic, deep_ep::device::combine_elastic_body)
