// What a call of normal mode does on this rank, worked out before anything is enqueued: pure functions of the call's
// arguments and of what was fixed when the buffer was made. They leave out of the kernels' parameters what is only
// known later: memory that the call is given, and how many rows come.
#pragma once

#include <cstddef>

#include "csrc/executor/kernel_table.hpp"
#include "deep_ep/buffer.hpp"
#include "kernels/intranode/params.hpp"

namespace deep_ep {

/// Fixed when the buffer is made.
struct IntranodeSetup {
  int num_ranks = 1;
  int max_local_experts = 1;
  Device device;
  LaunchPolicy policy;
  std::size_t heap_bytes = 0;
  std::size_t window_bytes = 0;
  int max_window_tokens = 0;

  bool on_gpu() const { return device.kind == Device::Kind::cuda; }
};

// Throw InvalidArgument.
void check_dispatch(const DispatchArguments& arguments, const IntranodeSetup& setup);
void check_dispatch(const CachedDispatchArguments& arguments, const IntranodeSetup& setup);
void check_combine(const CombineArguments& arguments, const IntranodeSetup& setup);

struct NotifyPlan {
  NotifyParams params{};
  LaunchShape shape;
};

struct DispatchPlan {
  DispatchParams params{};
  LaunchShape shape;
};

struct CombinePlan {
  CombineParams params{};
  LaunchShape shape;
};

NotifyPlan plan_notify(const DispatchArguments& arguments, const IntranodeSetup& setup);
DispatchPlan plan_dispatch(const DispatchArguments& arguments, const IntranodeSetup& setup);
DispatchPlan plan_dispatch(const CachedDispatchArguments& arguments, const IntranodeSetup& setup);
/// For rows that do not fit the heap: `params` know how many they are, and are told how they go through the window.
/// OutOfMemory when it is too small.
void plan_window(DispatchParams& params, std::byte* window, const IntranodeSetup& setup);

/// `pullable`: peers can read x and topk_weights where they lie. OutOfMemory when the window is too small for pushes.
CombinePlan plan_combine(const CombineArguments& arguments, bool pullable, const IntranodeSetup& setup);

}  // namespace deep_ep
