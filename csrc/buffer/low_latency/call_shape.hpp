// What must be equal on all ranks of a low-latency dispatch, and which of it two ranks differ in.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "deep_ep/low_latency_format.hpp"

namespace deep_ep {

struct LowLatencyCallShape {
  enum Field { max_tokens, hidden, local_experts, format, topk, rail_width, weights, too_many_tokens, kFields };
  std::array<std::int64_t, kFields> fields{};

  bool operator==(const LowLatencyCallShape&) const = default;
  /// 31 bits, which travel with a call.
  std::uint32_t hash() const;
};

/// The shapes of this rank's last calls.
class LowLatencyCallShapes {
 public:
  void note(const LowLatencyCallShape& shape);
  /// The field in which a call of `rank` with the hash `own` differs from one of `peer` with the hash `theirs`, and
  /// both values, in words. Empty if several differ, or the call is too long ago: other shapes are found by their hash.
  std::string difference(std::uint32_t own, std::uint32_t theirs, int rank, int peer, int num_ranks) const;

 private:
  static constexpr std::size_t kMost = 64;
  std::vector<LowLatencyCallShape> last_;
};

}  // namespace deep_ep
