// Runs the demo's layer on all ranks with the library, and checks what came back.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "deep_ep/tensor.hpp"
#include "tools/demo/check.hpp"
#include "tools/demo/model.hpp"

namespace deep_ep::tools {

/// The steps of the layer, in order. A step's time is that of its slowest rank, from the call to its last kernel.
enum class Phase : int { layout, dispatch, experts, combine, count };
const char* name_of(Phase phase);

/// A token of a rank.
struct TokenPlace {
  int rank = 0;
  std::int64_t token = 0;
};

/// A rank that one token has come to. Values are those of the token's first channel.
struct TokenVisit {
  std::int64_t row = 0;  ///< among those that the rank received
  float arrived = 0;
  std::vector<std::pair<int, float>> experts;  ///< of this rank, with the token's weights
  float sent_back = 0;
};

struct LayerResult {
  std::vector<double> phase_seconds;              ///< by Phase
  OutputError error;                              ///< over all ranks
  std::vector<std::optional<TokenVisit>> visits;  ///< of the followed token, by rank
  float came_home = 0;                            ///< its first channel
};

/// `followed`: the token whose way is written down. @throws Error where something differs from the oracle.
LayerResult run_layer(const ModelShape& shape, const std::vector<Batch>& batches, const oracle::Dispatched& routes,
                      const TokenPlace& followed, Device::Kind device);

}  // namespace deep_ep::tools
