// SMs of a call that does not say how many. What kernels limit is in kernels/common/limits.hpp and
// kernels/kernel_list.hpp; how a plan divides a block's warps, in that plan; how many warps suit a device, in its
// executor's LaunchPolicy.
#pragma once

namespace deep_ep::defaults {

// Tuning of calls: see buffer.hpp, "SMs". Few SMs saturate NVLink, on 8 H200: dispatch is as fast with 8 as with 24,
// combine with 16. The curves are in results/measurements/. Other numbers of ranks have not been tuned.
constexpr int kDispatchSms = 10;
constexpr int kCombineSms = 16;
constexpr int kLoadBalanceSms = 16;

}  // namespace deep_ep::defaults
