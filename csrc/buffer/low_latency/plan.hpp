// What a low-latency call does on this rank, worked out before anything is enqueued: pure functions of the call's
// arguments and of what was fixed when the buffer was made.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

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
  bool reject_unknown_experts = true;
  std::size_t low_latency_bytes = 0;
  int rail_width = 0;  ///< see LowLatencyReach
  bool rails_always = false;
  bool measured = false;  ///< calls add to statistics of waits

  bool on_gpu() const { return device.kind == Device::Kind::cuda; }
  bool rdma() const { return common.peers != nullptr; }
};

/// A kernel that does one part of a call, or both.
struct LowLatencyPart {
  LowLatencyPhase phase = LowLatencyPhase::both;
  LaunchShape shape = {};
  int working_blocks = 0;
  int rows_of_group = 0;  ///< of combine
  int selections = 0;     ///< of combine: see LowLatencySignals
};

/// What measures a call: launched around its receive part.
struct LowLatencyWaits {
  std::optional<LowLatencyWaitsParams> listens;  ///< before it
  LowLatencyWaitsParams adds;                    ///< behind it
};
void enqueue_waits(const KernelTable& kernels, const LowLatencyWaitsParams& params, StreamHandle stream);

/// A call: one kernel, or two when a hook enqueues the second, or a measured dispatch listens before it.
template <class Params>
struct LowLatencyPlan {
  Params params{};  ///< all but the part's, and memory that the call is given
  Launcher<Params> KernelTable::*kernel = nullptr;
  LowLatencyPart first;
  std::optional<LowLatencyPart> receive;         ///< with a hook, or where somebody listens before it
  bool hooked = false;                           ///< a hook enqueues it
  std::shared_ptr<const LowLatencyWaits> waits;  ///< of a call that is measured
};

struct LowLatencyDispatchPlan : LowLatencyPlan<LowLatencyDispatchParams> {
  // Types and shapes of the results.
  std::vector<TensorView> rows;    ///< recv_x, and the scales
  std::vector<TensorView> others;  ///< recv_count
  std::vector<TensorView> kept;    ///< of the handle: src_info, layout_range, row_table
};

using LowLatencyCombinePlan = LowLatencyPlan<LowLatencyCombineParams>;

/// Rows that a handle knows of, as they lie in recv_x.
struct HandleRows {
  std::int64_t blocks, rows;

  static HandleRows of(const LowLatencyHandle& handle, int num_ranks);
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

}  // namespace deep_ep
