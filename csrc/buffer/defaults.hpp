// Values that the caller may leave to the library, or choose within limits: SMs of a call, parts of the heap. C++,
// Python and the tools take these numbers from here. What kernels limit is in kernels/common/limits.hpp and
// kernels/kernel_list.hpp; how a plan divides a block's warps, in that plan; how many warps suit a device, in its
// executor's LaunchPolicy.
#pragma once

#include <algorithm>
#include <cstddef>

namespace deep_ep::defaults {

// Tuning of calls: see buffer.hpp, "SMs". Few SMs saturate NVLink, on 8 H200: dispatch is as fast with 8 as with 24,
// combine with 16. The curves are in results/measurements/. Other numbers of ranks have not been tuned.
constexpr int kDispatchSms = 10;
constexpr int kCombineSms = 16;
constexpr int kLoadBalanceSms = 16;

/// Of the heap, the window takes a quarter, up to 1 GiB.
constexpr std::size_t window_bytes(std::size_t heap_bytes) { return std::min(heap_bytes / 4, std::size_t{1} << 30); }
/// The most that hints ask for rows of low-latency calls: with their signals a tenth of what a GPU has.
constexpr std::size_t kMostLowLatencyBytes = std::size_t{7} << 30;

}  // namespace deep_ep::defaults
