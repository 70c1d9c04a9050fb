// What plans of dispatch and of combine have in common.
#pragma once

#include <algorithm>
#include <cstdint>

#include "csrc/buffer/low_latency/call_shape.hpp"
#include "csrc/buffer/low_latency/plan.hpp"

namespace deep_ep {

/// Blocks of `warps` warps that post to ranks reached by RDMA: a warp for each lane to each such rank.
inline int poster_blocks(const LowLatencySetup& setup, int warps) {
  return setup.rdma() ? (setup.common.num_far * setup.common.lanes + warps - 1) / warps : 0;
}

/// InvalidArgument where the blocks that post, and one more, cannot run side by side: on a GPU they wait for each
/// other.
void check_resident(int others, const LowLatencySetup& setup);

/// Blocks for everything else: no more in all than there are SMs, or than the caller allows.
inline int most_working_blocks(const Config& config, const LowLatencySetup& setup, int others) {
  check_resident(others, setup);
  const int all = setup.policy.multiprocessors;
  return std::max(1, (config.num_sms != 0 ? std::min(config.num_sms, all) : all) - others);
}

/// Of a block. `most_threads`: as many as have registers enough.
inline int warps_of_block(const Config& config, const LowLatencySetup& setup, int most_threads, int least) {
  const int most = std::max(std::min(most_threads, setup.policy.max_block_threads) / 32, least);
  const int usual = setup.on_gpu() ? most : setup.policy.warps_per_block;
  return std::clamp(config.warps_per_block != 0 ? config.warps_per_block : usual, least, most);
}

/// InvalidArgument unless `max_tokens` rows of `row_bytes` from each rank fit the window.
void check_room(std::int64_t max_tokens, std::int64_t hidden, std::size_t row_bytes, const LowLatencySetup& setup);

/// Whether the call goes by rails, if it may: the ranks of a node, else 0. Rows directly, and by rails, have so many
/// bytes.
int choose_rails(bool may, int max_tokens, int num_topk, std::size_t row_bytes, std::size_t rail_row_bytes,
                 const LowLatencySetup& setup);

/// The plan's parts, each as `plan_part(phase)` says. `split`: two also without a hook.
template <class Plan, class PlanPart>
void plan_parts(Plan& plan, bool hook, bool split, PlanPart&& plan_part) {
  plan.hooked = hook;
  if (!hook && !split) {
    plan.first = plan_part(LowLatencyPhase::both);
    return;
  }
  plan.first = plan_part(LowLatencyPhase::send);
  plan.receive = plan_part(LowLatencyPhase::receive);
}

}  // namespace deep_ep
