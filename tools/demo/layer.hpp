// Runs the demo's layer on all ranks with the library, and checks what came back.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "deep_ep/tensor.hpp"
#include "oracle/normal.hpp"
#include "tools/demo/model.hpp"

namespace deep_ep::tools {

/// Which token must go where: the oracle's dispatch of the batches (one for each rank), without the rows' bytes.
oracle::Dispatched routes_of(const ModelShape& shape, std::span<const Batch> batches);

/// Compares the layer's output [tokens, hidden] bfloat16 of a rank with the sums over the tokens' experts. `ranks`
/// share the experts evenly, in order. @returns the largest difference, relative to what rounding to BF16 explains.
/// @throws Error where that is above 1.
double check_output(const ModelShape& shape, const Batch& batch, int rank, int ranks,
                    std::span<const std::uint16_t> output);

/// @returns as check_output, of all ranks. @throws Error where something differs from the oracle.
double run_layer(const ModelShape& shape, const std::vector<Batch>& batches, const oracle::Dispatched& routes,
                 Device::Kind device);

}  // namespace deep_ep::tools
