// LogFMT-10: 10 bits a value, a sign and the logarithm in equal steps, as the low-latency combine sends rows on
// request.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace deep_ep::oracle {

inline constexpr int kLogfmtGroup = 128;

/// What 128 values have in common. Code 0 is zero, code c > 0 is 2^((c - 1) * step + low).
struct LogfmtGroup {
  bool encodable = false;  ///< below 1 in magnitude, and of more than one magnitude
  double low = 0;          ///< log2 of the smallest magnitude, at most 32 below the largest
  double step = 0;         ///< 511 codes reach from the smallest to the largest
};
LogfmtGroup logfmt_group(std::span<const std::uint16_t> bf16);

/// The code of |value|: the nearest representable magnitude in the linear domain.
int logfmt_code(const LogfmtGroup& group, double value);
double logfmt_magnitude(const LogfmtGroup& group, int code);

/// Channels that are encoded together or not at all.
int logfmt_chunk(std::int64_t hidden);

/// A row as it arrives: decoded where its chunk could be encoded, unchanged elsewhere.
std::vector<float> logfmt_round_trip(std::span<const std::uint16_t> row);

}  // namespace deep_ep::oracle
