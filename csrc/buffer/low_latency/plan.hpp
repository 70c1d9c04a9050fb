// What a low-latency call does on this rank, worked out before anything is enqueued: pure functions of the call's
// arguments and of what was fixed when the buffer was made.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "csrc/buffer/buffer_plan.hpp"
#include "csrc/buffer/call_scope.hpp"
#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/runtime.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/buffer.hpp"
#include "kernels/low_latency/params.hpp"

namespace deep_ep {

/// Fixed when the buffer is made.
struct LowLatencySetup {
  LowLatencyParams common;  ///< what every kernel of the family is told
  LowLatencyReach reach;
  Device device;
  LaunchPolicy policy;
  int max_local_experts = 1;
  double nic_bytes_per_ns = 50;  ///< see rdma::AgreedWire
  int rest_bits = 16;            ///< see CombineRowFormat

  bool on_gpu() const { return device.kind == Device::Kind::cuda; }
  bool rdma() const { return common.peers != nullptr; }
};

/// A kernel that does one part of a call, or both.
struct LowLatencyPart {
  LowLatencyPhase phase = {};
  LaunchShape shape = {};
  int working_blocks = 0;
};

/// A call: one kernel, or two when a hook enqueues the second.
template <class Params>
struct LowLatencyPlan {
  Params params{};  ///< all but the part's, and memory that the call is given
  KernelChoice<Params> kernel{};
  int warps = 1;                ///< of a block: as many as have registers enough
  int posters = 0;              ///< blocks that post to ranks reached by RDMA: a warp for each lane to each such rank
  int most_working_blocks = 1;  ///< for everything but posting
  LowLatencyPart first;
  std::optional<LowLatencyPart> receive;  ///< a hook enqueues it

  /// There are no more blocks than SMs, or than the caller allows, but `least` that work. InvalidArgument where these
  /// and the posters cannot run side by side: on a GPU they wait for each other.
  void choose(const KernelChoice<Params>& choice, int num_sms, int least, const LowLatencySetup& setup) {
    kernel = choice;
    warps = choice.max_threads / 32;
    if (!setup.on_gpu()) warps = std::min(warps, setup.policy.warps_per_block);
    if (setup.rdma()) posters = (setup.common.num_far * setup.common.lanes + warps - 1) / warps;
    const int all = setup.policy.multiprocessors, needed = posters + least;
    if (setup.on_gpu() && needed > all) {
      fail<InvalidArgument>(
          "a low-latency call that reaches {} ranks by RDMA needs {} blocks side by side, but this process has {} "
          "multiprocessors of the GPU: raise CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
          setup.common.num_far, needed, all);
    }
    most_working_blocks = std::max(least, (num_sms != 0 ? std::min(num_sms, all) : all) - posters);
  }

  /// The parts, each as `plan_part(phase)` says. InvalidArgument if a block does not have what one needs.
  template <class PlanPart>
  void plan_parts(bool hook, const LowLatencySetup& setup, const PlanPart& plan_part) {
    const auto make = [&](LowLatencyPhase phase) {
      const LowLatencyPart part = plan_part(phase);
      if (part.shape.shared_bytes > setup.policy.max_shared_bytes) {
        fail<InvalidArgument>(
            "low-latency calls: hidden {}, max_tokens {} and num_experts {} need {} of shared memory in a block, there "
            "are {}",
            params.hidden, params.max_tokens, params.num_experts(), format_bytes(part.shape.shared_bytes),
            format_bytes(setup.policy.max_shared_bytes));
      }
      return part;
    };
    first = make({.receives = !hook});
    if (hook) receive = make({.sends = false});
  }

  void enqueue(const LowLatencyPart& part, const Runtime& runtime, const CallScope& scope) const {
    Params mine = params;
    mine.phase = part.phase;
    mine.common.working_blocks = part.working_blocks;
    runtime.launch(kernel, mine, part.shape, scope);
  }
};

using LowLatencyDispatchPlan = LowLatencyPlan<LowLatencyDispatchParams>;
using LowLatencyCombinePlan = LowLatencyPlan<LowLatencyCombineParams>;

/// Then the call is made all the same, without tokens, and raises afterwards: peers, who wait for this rank, learn from
/// its call shape what is wrong, instead of waiting until the deadline.
inline bool too_many_tokens(const LowLatencyDispatchArguments& arguments) {
  return arguments.x.size(0) > arguments.max_tokens;
}

/// Throw InvalidArgument for arguments that break a rule, or do not fit the window, or a block.
LowLatencyDispatchPlan plan_dispatch(const LowLatencyDispatchArguments& arguments, const LowLatencySetup& setup);
LowLatencyCombinePlan plan_combine(const LowLatencyCombineArguments& arguments, const LowLatencySetup& setup);

/// The bytes of a row as it travels directly, and by rails; and the largest that a place of the window has to hold.
struct LowLatencyRowBytes {
  std::size_t direct, by_rails, largest;
};

/// Decides whether the call goes by rails, if it `may`. InvalidArgument if the rows of each rank do not fit the window.
inline void choose_rails(LowLatencyKind kind, bool may, LowLatencyCallParams& params, const LowLatencyRowBytes& row,
                         const LowLatencySetup& setup) {
  const std::size_t room = setup.common.window.source_bytes[static_cast<std::size_t>(kind)];
  const LowLatencyWindow& window = setup.common.window;
  const auto needed = [&](std::size_t row_bytes) { return static_cast<std::size_t>(params.max_tokens) * row_bytes; };
  const auto pay = [&] {
    // Do rails save more time of the NIC than the additional hop takes? Directly a rank sends to other nodes a row for
    // each rank that is selected, by rails one for each node, if every expert is equally likely to be selected.
    constexpr double kHopNs = 5000;  // what a call within a node takes beyond its bytes
    const int ranks = setup.common.num_ranks;
    const int nodes = ranks / setup.reach.rail_width;
    // A token has a row for each of `others` of so many equal parts, if some of its selections fall to that part.
    const auto bytes = [&](int others, int parts, std::size_t row_bytes) {
      const double selected = 1 - std::pow(1 - 1.0 / parts, static_cast<int>(params.num_topk));
      return others * selected * static_cast<double>(needed(row_bytes));
    };
    const double saved =
        bytes(ranks - setup.reach.rail_width, ranks, row.direct) - bytes(nodes - 1, nodes, row.by_rails);
    return saved > kHopNs * setup.nic_bytes_per_ns;
  };
  const bool may_go = may && setup.reach.rail_width != 0 && needed(std::max(row.by_rails, row.largest)) <= room;
  const bool goes = may_go && (setup.reach.rails_always || pay());
  if (goes) params.common.rail_width = setup.reach.rail_width;
  const std::size_t row_bytes = std::max(goes ? row.by_rails : row.direct, row.largest);
  if (params.max_tokens <= static_cast<std::int64_t>(window.slots) && needed(row_bytes) <= room) return;
  fail<InvalidArgument>(
      "max_tokens {} and hidden {} do not fit low_latency.bytes {}: there is room for {} tokens and {} of rows from "
      "each rank, this call has rows of {}, {} in all; Buffer::low_latency_bytes_hint says what is needed",
      params.max_tokens, params.hidden, window.bytes_of_calls(), window.slots, format_bytes(room),
      format_bytes(row_bytes), format_bytes(needed(row_bytes)));
}

/// Sets the parameters that both kinds of calls have, of x and topk_idx that are checked, and checks the other
/// arguments. Rows of x are multiples of so many channels.
template <class Params, class Arguments>
void set_call(Params& params, const Arguments& arguments, int max_tokens, int num_experts, int channels,
              const LowLatencySetup& setup) {
  const ConstTensorView& x = arguments.x;
  const std::int64_t hidden = x.size(x.dims - 1);
  if (hidden <= 0 || hidden % channels != 0 || hidden > INT32_MAX / 4) {
    fail<InvalidArgument>("x is {}, its hidden size must be a multiple of {}", x.describe(), channels);
  }
  check_alignment("x", x);
  check_sms(arguments.num_sms);
  params.common = setup.common;
  params.max_tokens = max_tokens;
  params.num_topk = static_cast<int>(arguments.topk_idx.size(1));
  params.hidden = static_cast<int>(hidden);
  params.num_local_experts = num_experts / setup.common.num_ranks;
  params.expert_rows = setup.common.num_ranks * max_tokens;
  params.x = x.template as<std::byte>();
  params.num_tokens = static_cast<int>(arguments.topk_idx.size(0));
  params.topk_idx = {arguments.topk_idx.data, arguments.topk_idx.dtype == DType::int64};
  params.wait_cost = checked_memory<std::int64_t>("wait_recv_cost_stats", arguments.wait_recv_cost_stats, setup.device,
                                                  DType::int64, {setup.common.num_ranks});
}

}  // namespace deep_ep
