// Runs the demo's layer on all ranks with the library, and checks what came back.
#pragma once

#include <string>
#include <vector>

#include "deep_ep/tensor.hpp"
#include "tools/demo/model.hpp"
#include "tools/demo/reference.hpp"

namespace deep_ep::tools {

/// The steps of the layer, in order. A step's time is that of its slowest rank, from the call to its last kernel.
enum class Phase : int { layout, dispatch, dispatch_8bit, experts, combine, count };
const char* name_of(Phase phase);

struct LayerResult {
  std::vector<double> phase_seconds;  ///< by Phase
  Difference output;                  ///< over all ranks
  std::vector<std::string> failures;  ///< everything that differs from the reference, one line each
};

LayerResult run_layer(const ModelShape& shape, const std::vector<Batch>& batches, const Reference& reference,
                      Device::Kind device);

}  // namespace deep_ep::tools
