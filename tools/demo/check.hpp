// Compares what came back with what the oracle says. Each throws Error at the first difference.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "oracle/normal.hpp"
#include "tools/demo/model.hpp"

namespace deep_ep::tools {

/// Which token must go where: the oracle's dispatch of the batches (one for each rank), without the rows' bytes.
oracle::Dispatched routes_of(const ModelShape& shape, std::span<const Batch> batches);

/// How far sums are from the oracle's.
struct OutputError {
  double largest = 0;
  double largest_of_bound = 0;  ///< relative to what rounding to BF16 explains; above 1 it would be wrong
};
/// The layer's output [tokens, hidden] bfloat16 of a rank, against the sums over the tokens' experts. `ranks` share the
/// experts evenly, in order.
OutputError check_output(const ModelShape& shape, const Batch& batch, int rank, int ranks,
                         std::span<const std::uint16_t> output);

}  // namespace deep_ep::tools
