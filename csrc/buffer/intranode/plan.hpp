// The plan of a normal-mode call inside a node: pure functions compute it from the call's arguments and the buffer's
// settings before this rank enqueues anything. Kernel parameters that are known later stay empty: the memory that the
// call is given, and the number of rows that come.
#pragma once

#include <cstddef>

#include "csrc/buffer/normal_mode_arguments.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "kernels/intranode/params.hpp"

namespace deep_ep {

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

NotifyPlan plan_notify(const DispatchArguments& arguments, const NormalModeSetup& setup);
DispatchPlan plan_dispatch(const DispatchArguments& arguments, const NormalModeSetup& setup);
DispatchPlan plan_dispatch(const CachedDispatchArguments& arguments, const NormalModeSetup& setup);
/// For rows that do not fit the heap: `params` know how many they are, and are told how they go through the window.
/// OutOfMemory when it is too small.
void plan_window(DispatchParams& params, std::byte* window, const NormalModeSetup& setup);

/// `pullable`: peers can read x and topk_weights where they lie. OutOfMemory when the window is too small for pushes.
CombinePlan plan_combine(const CombineArguments& arguments, bool pullable, const NormalModeSetup& setup);

}  // namespace deep_ep
