// What a low-latency call does on this rank, worked out before anything is enqueued: pure functions of the call's
// arguments and of what was fixed when the buffer was made.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>

#include "csrc/executor/kernel_table.hpp"
#include "deep_ep/buffer.hpp"
#include "kernels/low_latency/params.hpp"

namespace deep_ep {

/// Fixed when the buffer is made.
struct LowLatencySetup {
  LowLatencyParams common;  ///< what every kernel of the family is told
  Device device;
  LaunchPolicy policy;
  int max_local_experts = 1;
  std::size_t low_latency_bytes = 0;
  int rail_width = 0;  ///< see LowLatencyReach
  bool rails_always = false;
  double nic_bytes_per_ns = 50;  ///< see rdma::AgreedWire

  bool on_gpu() const { return device.kind == Device::Kind::cuda; }
  bool rdma() const { return common.peers != nullptr; }
};

/// A kernel that does one part of a call, or both.
struct LowLatencyPart {
  LowLatencyPhase phase = LowLatencyPhase::both;
  LaunchShape shape = {};
  int working_blocks = 0;
  int rows_of_group = 0;  ///< of combine: see LowLatencySignals
};

/// A call: one kernel, or two when a hook enqueues the second.
template <class Params>
struct LowLatencyPlan {
  Params params{};  ///< all but the part's, and memory that the call is given
  Launcher<Params> KernelTable::*kernel = nullptr;
  LowLatencyPart first;
  std::optional<LowLatencyPart> receive;  ///< a hook enqueues it
};

using LowLatencyDispatchPlan = LowLatencyPlan<LowLatencyDispatchParams>;
using LowLatencyCombinePlan = LowLatencyPlan<LowLatencyCombineParams>;

/// Rows that a handle knows of, as they lie in recv_x.
struct HandleRows {
  HandleRows(const LowLatencyHandle& handle, int num_ranks)
      : blocks(handle.num_experts / num_ranks), rows(std::int64_t{num_ranks} * handle.max_tokens) {}
  std::int64_t blocks, rows;
};

// Throw InvalidArgument.
void check_dispatch(const LowLatencyDispatchArguments& arguments, const LowLatencySetup& setup);
void check_combine(const LowLatencyCombineArguments& arguments, const LowLatencySetup& setup);
void check_handle(const LowLatencyHandle& handle, const LowLatencySetup& setup);

/// Then the call is made all the same, without tokens, and raises afterwards: peers, who wait for this rank, learn from
/// its call shape what is wrong, instead of waiting until the deadline.
inline bool too_many_tokens(const LowLatencyDispatchArguments& arguments) {
  return arguments.x.size(0) > arguments.max_tokens;
}

/// InvalidArgument when the call does not fit the window, or a block.
LowLatencyDispatchPlan plan_dispatch(const LowLatencyDispatchArguments& arguments, const LowLatencySetup& setup);
LowLatencyCombinePlan plan_combine(const LowLatencyCombineArguments& arguments, const LowLatencySetup& setup);

/// What must be equal on all ranks of a call, in a word that travels with it: ranks that disagree would misread each
/// other. A hash (FNV-1a).
inline std::uint32_t call_shape_of(std::initializer_list<int> fields) {
  std::uint32_t hash = 2166136261u;
  for (const int field : fields) {
    for (int byte = 0; byte < 4; ++byte) {
      hash = (hash ^ (static_cast<std::uint32_t>(field) >> (8 * byte) & 0xffu)) * 16777619u;
    }
  }
  return hash >> 1;
}

// What plans of dispatch and of combine have in common.

/// Blocks of `warps` warps that post to ranks reached by RDMA: a warp for each lane to each such rank.
inline int poster_blocks(const LowLatencySetup& setup, int warps) {
  return setup.rdma() ? (setup.common.num_far * setup.common.lanes + warps - 1) / warps : 0;
}

/// InvalidArgument where the blocks that post, and one more, cannot run side by side: on a GPU they wait for each
/// other.
void check_resident(int others, const LowLatencySetup& setup);

/// Blocks for everything else: no more in all than there are SMs, or than the caller allows, but `least`.
inline int most_working_blocks(const Config& config, const LowLatencySetup& setup, int others, int least = 1) {
  check_resident(others + least - 1, setup);
  const int all = setup.policy.multiprocessors;
  return std::max(least, (config.num_sms != 0 ? std::min(config.num_sms, all) : all) - others);
}

/// Of a block. `most_threads`: as many as have registers enough.
inline int warps_of_block(const LowLatencySetup& setup, int most_threads) {
  const int most = std::max(std::min(most_threads, setup.policy.max_block_threads) / 32, 1);
  return setup.on_gpu() ? most : std::clamp(setup.policy.warps_per_block, 1, most);
}

/// InvalidArgument unless `max_tokens` rows of `row_bytes` from each rank fit the window.
void check_room(std::int64_t max_tokens, std::int64_t hidden, std::size_t row_bytes, const LowLatencySetup& setup);

/// Whether the call goes by rails, if it may: the ranks of a node, else 0. Rows directly, and by rails, have so many
/// bytes.
int choose_rails(bool may, int max_tokens, int num_topk, std::size_t row_bytes, std::size_t rail_row_bytes,
                 const LowLatencySetup& setup);

/// The plan's parts, each as `plan_part(phase)` says.
template <class Plan, class PlanPart>
void plan_parts(Plan& plan, bool hook, PlanPart&& plan_part) {
  if (!hook) {
    plan.first = plan_part(LowLatencyPhase::both);
    return;
  }
  plan.first = plan_part(LowLatencyPhase::send);
  plan.receive = plan_part(LowLatencyPhase::receive);
}

}  // namespace deep_ep
