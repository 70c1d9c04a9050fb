// Runs the demo's layer on all ranks with the library, and checks what came back.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "deep_ep/tensor.hpp"
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

/// The steps of the layer, in order. A step's time is that of its slowest rank, from the call to its last kernel.
inline constexpr std::array kPhases = {"layout", "dispatch", "experts (on the CPU)", "combine"};

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
  std::array<double, kPhases.size()> phase_seconds{};
  OutputError error;                              ///< over all ranks
  std::vector<std::optional<TokenVisit>> visits;  ///< of the followed token, by rank
  float came_home = 0;                            ///< its first channel
};

/// `followed`: the token whose way is written down. @throws Error where something differs from the oracle.
LayerResult run_layer(const ModelShape& shape, const std::vector<Batch>& batches, const oracle::Dispatched& routes,
                      const TokenPlace& followed, Device::Kind device);

}  // namespace deep_ep::tools
