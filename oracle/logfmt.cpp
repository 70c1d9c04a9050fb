#include "oracle/logfmt.hpp"

#include <algorithm>
#include <cmath>

#include "oracle/bf16.hpp"

namespace deep_ep::oracle {

LogfmtGroup logfmt_group(std::span<const std::uint16_t> bf16) {
  double amax = 0;
  double amin = HUGE_VAL;
  for (const std::uint16_t bits : bf16) {
    const double magnitude = std::fabs(static_cast<double>(bf16_value(bits)));
    amax = std::max(amax, magnitude);
    amin = std::min(amin, magnitude);
  }
  const double high = std::log2(amax);
  LogfmtGroup group;
  group.low = std::max(std::log2(amin), high - 32);
  group.encodable = high < 0 && group.low < high;
  group.step = (high - group.low) / 510;
  return group;
}

int logfmt_code(const LogfmtGroup& group, double value) {
  const double magnitude = std::fabs(value);
  if (magnitude == 0) return 0;
  // The middle of two neighbours, seen from the lower one, in steps.
  const double middle = std::log2((1 + std::exp2(group.step)) / 2) / group.step;
  const double code = std::floor((std::log2(magnitude) - group.low) / group.step + 2 - middle);
  return static_cast<int>(std::clamp(code, 0.0, 511.0));
}

double logfmt_magnitude(const LogfmtGroup& group, int code) {
  return code == 0 ? 0.0 : std::exp2((code - 1) * group.step + group.low);
}

int logfmt_chunk(std::int64_t hidden) { return hidden % 1024 == 0 ? 1024 : 512; }

std::vector<float> logfmt_round_trip(std::span<const std::uint16_t> row) {
  std::vector<float> result;
  for (const std::uint16_t bits : row) result.push_back(bf16_value(bits));
  const auto chunk = static_cast<std::size_t>(logfmt_chunk(static_cast<std::int64_t>(row.size())));
  for (std::size_t begin = 0; begin < row.size(); begin += chunk) {
    const std::size_t end = std::min(begin + chunk, row.size());
    std::vector<LogfmtGroup> groups;
    for (std::size_t at = begin; at < end; at += kLogfmtGroup) {
      groups.push_back(logfmt_group(row.subspan(at, std::min<std::size_t>(kLogfmtGroup, end - at))));
    }
    if (!std::ranges::all_of(groups, [](const LogfmtGroup& group) { return group.encodable; })) continue;
    for (std::size_t i = begin; i < end; ++i) {
      const LogfmtGroup& group = groups[(i - begin) / kLogfmtGroup];
      const double magnitude = logfmt_magnitude(group, logfmt_code(group, static_cast<double>(result[i])));
      result[i] = static_cast<float>(std::copysign(magnitude, static_cast<double>(result[i])));
    }
  }
  return result;
}

}  // namespace deep_ep::oracle
