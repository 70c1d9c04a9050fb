// Combine of the second interface: for each token of this rank, the sum of the rows that the ranks of its experts hold.
//
// A rank adds up its rows of a token first and pushes the rounded sum, once over NVLink, into the owner's window; or it
// pushes each row, if there is to be one rounding only. The owner adds while rows arrive. It makes no difference where
// x lies or how much of the heap is in use.
#include "kernels/elastic/combine_add.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/normal/meet.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device {

/// Meets the other ranks, whose windows are then free, and pushes. False after a fault.
DEEP_EP_DEVICE bool meet_and_push(const ElasticCombineParams& params, const ElasticCombineShared& shared,
                                  const Meeting& meeting, const Arrival& ours) {
  ElasticPusher pusher{params, shared, meeting.epoch};
  pusher.prepare();
  const bool good = block::all(meeting.hear_all(ours));
  if (good) pusher.push_all();
  return good;
}

DEEP_EP_DEVICE void combine_elastic_body(const ElasticCombineParams& params, std::byte* memory) {
  const IntranodeParams& common = params.common;
  const ElasticCombineShared shared{Carver(memory), common.num_ranks};
  block::each(ElasticCombineShared::kMostShared, [&](int team) { shared.arrived[team] = 0; });
  block::each(common.num_ranks, [&](int rank) {
    const std::int32_t end = load_weak(params.source_ends + rank);
    const auto rows = static_cast<std::int32_t>(params.metadata.valid());
    shared.source_ends[rank] = end < rows ? end : rows;
  });
  const Call call = Call::begin(common.state->combine, common.wait);
  if (call.begun) {
    // 1. This rank's window is free: the call before has ended here.
    const Meeting meeting{common, Wanted::combine_addresses, MeetingKind::combine, call.epoch};
    // Equal on all ranks, so that windows are laid out alike: see kAgreedRowsToPeer.
    const int kind = (params.weighted ? 1 : 0) + (params.each_selection ? 2 : 0);
    const Arrival ours{
        {static_cast<std::int32_t>(params.row_bytes), 0, params.num_topk, params.window.max_tokens, kind}};
    if (block_index() == 0) meeting.announce(ours);
    // 2. Some warps push, and then all add. Blocks that only add need no word of others but their rows' flags.
    if (block_index() >= params.pushing_blocks || meet_and_push(params, shared, meeting, ours)) {
      ElasticAdder{params, call.epoch}.add_all();
    }
  }
  call.end<Scope::gpu>([&] {
    if (thread_index() != 0) return;
    store_relaxed<Scope::gpu>(&common.state->pieces_drawn, std::uint32_t{0});
    store_relaxed<Scope::gpu>(&common.state->elastic_rows_drawn, std::uint32_t{0});
  });
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(combine_elastic, deep_ep::device::combine_elastic_body)
