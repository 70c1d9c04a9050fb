// Sweeps of the low-latency calls.
#pragma once

#include "deep_ep/tensor.hpp"

namespace deep_ep::benchmarks {

/// Registers them. `full`: on the CPU, the sizes of the GPU sweeps.
void add_low_latency(Device::Kind device, int ranks, bool full);

}  // namespace deep_ep::benchmarks
