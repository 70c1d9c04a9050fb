#include "csrc/buffer/low_latency/call_shape.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/low_latency/params.hpp"
#include "kernels/normal/params.hpp"

namespace deep_ep {
namespace {

constexpr const char* kFormats[] = {"bf16", "fp8", "fp8_round_scale", "fp8_ue8m0", "nvfp4", "fp8_aligned"};

/// The values that a field can have: `least`, and up to `most` in steps.
struct Values {
  std::int64_t least, most, step = 1;
};
constexpr std::array<Values, LowLatencyCallShape::kFields> kValues = {{
    {1, kMostLowLatencyTokens},
    {kScaleChannels, 1 << 20, kScaleChannels},
    {1, kMostLowLatencyExperts},
    {0, std::size(kFormats) - 1},
    {1, kMaxTopk},
    {0, kMaxRanks},
    {0, 1},
    {0, 1},
}};

std::string describe(int field, std::int64_t value, int num_ranks) {
  switch (field) {
    case LowLatencyCallShape::local_experts:
      return std::to_string(value * num_ranks);
    case LowLatencyCallShape::format:
      return kFormats[value];
    case LowLatencyCallShape::weights:
      return value != 0 ? "given" : "not given";
    case LowLatencyCallShape::rail_width:
      return value != 0 ? std::to_string(value) : "0 (return_recv_hook is given)";
    default:
      return std::to_string(value);
  }
}

}  // namespace

std::uint32_t LowLatencyCallShape::hash() const {
  std::uint32_t shape = 1;
  for (const std::int64_t field : fields) shape = combine_shapes(shape, static_cast<std::uint32_t>(field));
  return shape >> 1;
}

void LowLatencyCallShapes::note(const LowLatencyCallShape& shape) {
  if (!last_.empty() && last_.back() == shape) return;
  std::erase(last_, shape);
  if (last_.size() == kMost) last_.erase(last_.begin());
  last_.push_back(shape);
}

std::string LowLatencyCallShapes::difference(std::uint32_t own, std::uint32_t theirs, int rank, int peer,
                                             int num_ranks) const {
  constexpr const char* kNames[] = {"max_tokens", "hidden",          "num_experts",     "rows' format",
                                    "top-k",      "ranks of a rail", "combine_weights", ""};
  const auto mine = std::ranges::find(last_, own, &LowLatencyCallShape::hash);
  if (mine == last_.end()) return {};
  for (int field = 0; field < LowLatencyCallShape::kFields; ++field) {
    LowLatencyCallShape other = *mine;
    const auto at = static_cast<std::size_t>(field);
    std::int64_t& value = other.fields[at];
    for (value = kValues[at].least; value <= kValues[at].most; value += kValues[at].step) {
      if (other.hash() != theirs) continue;
      if (field == LowLatencyCallShape::too_many_tokens) {
        return fmt::format("low_latency_dispatch: rank {} has more tokens than max_tokens, which its own error says",
                           value != 0 ? peer : rank);
      }
      return fmt::format("low_latency_dispatch: {} is {} on rank {} but {} on rank {}; it must be equal on all ranks",
                         kNames[field], describe(field, mine->fields[at], num_ranks), rank,
                         describe(field, value, num_ranks), peer);
    }
  }
  return {};
}

}  // namespace deep_ep
