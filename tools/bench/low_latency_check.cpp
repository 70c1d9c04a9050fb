#include "tools/bench/low_latency_check.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>
#include <vector>

#include "deep_ep/error.hpp"
#include "tools/common/number_formats.hpp"

namespace deep_ep::tools {
namespace {

constexpr int kBlock = 128;  // channels that share a scale

template <class T>
std::vector<T> to_host(Executor& executor, const TensorView& tensor, StreamHandle stream) {
  std::vector<T> values(static_cast<std::size_t>(tensor.elements()) * size_of(tensor.dtype) / sizeof(T));
  if (!values.empty()) {
    executor.copy(values.data(), tensor.data, values.size() * sizeof(T), stream);
    executor.synchronize(stream);
  }
  return values;
}

std::size_t at(std::int64_t row, std::int64_t width, std::int64_t column = 0) {
  return static_cast<std::size_t>(row * width + column);
}

/// A row as it arrives.
struct Row {
  std::vector<std::byte> bytes;
  std::vector<float> scales;
};

Row expected_row(const WorkloadShape& shape, int source, std::int64_t token, bool fp8) {
  std::vector<std::uint16_t> x(static_cast<std::size_t>(shape.hidden));
  fill_row_bf16(source, token, x);
  Row row;
  if (!fp8) {
    const auto bytes = std::as_bytes(std::span(x));
    row.bytes.assign(bytes.begin(), bytes.end());
    return row;
  }
  for (std::size_t begin = 0; begin < x.size(); begin += kBlock) {
    float amax = 1e-4f;
    for (std::size_t i = begin; i < begin + kBlock; ++i) amax = std::max(amax, std::fabs(bf16_to_float(x[i])));
    row.scales.push_back(amax * (1.0f / 448.0f));
    const float multiplier = 448.0f / amax;
    for (std::size_t i = begin; i < begin + kBlock; ++i) {
      row.bytes.push_back(std::byte{float_to_e4m3(bf16_to_float(x[i]) * multiplier)});
    }
  }
  return row;
}

float rounded(float value) { return bf16_to_float(float_to_bf16(value)); }

/// What combine makes of the ranks' parts for `owner`: by rails with nodes of `width` ranks, or directly where it is 0.
float sum_of(std::span<const float> parts, int owner, int width) {
  float sum = 0;
  float of_node = 0;
  for (int rank = 0; rank < static_cast<int>(parts.size()); ++rank) {
    const bool together = width != 0 && rank / width != owner / width;
    (together ? of_node : sum) += parts[at(rank, 1)];
    if (!together || (rank + 1) % width != 0) continue;
    sum += rounded(of_node);
    of_node = 0;
  }
  return rounded(sum);
}

/// How many ranks a node may have where combine may go by rails.
std::vector<int> rail_widths(int ranks, LowLatencyCombine kind, const LowLatencyReach& reach) {
  std::vector<int> widths;
  if (reach.rails == LowLatencyRails::never || !reach.nvlink || kind == LowLatencyCombine::logfmt) return widths;
  for (int width = 2; width < ranks; ++width) {
    const bool possible = reach.ranks_per_node == 0 ? ranks % width == 0 : width == reach.ranks_per_node;
    if (possible) widths.push_back(width);
  }
  return widths;
}

}  // namespace

void check_low_latency_dispatch(Executor& executor, StreamHandle stream, const WorkloadShape& shape, int rank, bool fp8,
                                const LowLatencyDispatchResult& result) {
  const std::int64_t rows = shape.ranks * shape.tokens;  // of one expert
  const std::int64_t row_bytes = shape.hidden * (fp8 ? 1 : 2);
  const std::int64_t blocks = fp8 ? shape.hidden / kBlock : 0;
  const auto x = to_host<std::byte>(executor, result.recv_x.view(), stream);
  const auto scales =
      fp8 ? to_host<float>(executor, result.recv_x_scales.value().view(), stream) : std::vector<float>{};
  const auto counts = to_host<std::int32_t>(executor, result.recv_count.view(), stream);
  const auto src_info = to_host<std::int32_t>(executor, result.handle.src_info.view(), stream);
  const auto ranges = to_host<std::int64_t>(executor, result.handle.layout_range.view(), stream);
  std::vector<std::int64_t> received(static_cast<std::size_t>(shape.local_experts()), 0);
  for (int source = 0; source < shape.ranks; ++source) {
    const std::vector<std::int64_t> selection = make_selection(shape, source);
    const std::vector<std::int64_t> begin = received;
    for (std::int64_t token = 0; token < shape.tokens; ++token) {
      for (int k = 0; k < shape.topk; ++k) {
        const std::int64_t local = selection[at(token, shape.topk, k)] - std::int64_t{rank} * shape.local_experts();
        if (local < 0 || local >= shape.local_experts()) continue;
        const std::int64_t row = local * rows + received[static_cast<std::size_t>(local)]++;
        const Row expected = expected_row(shape, source, token, fp8);
        bool same = std::memcmp(x.data() + at(row, row_bytes), expected.bytes.data(), expected.bytes.size()) == 0 &&
                    src_info[static_cast<std::size_t>(row)] == token;
        for (std::int64_t block = 0; same && block < blocks; ++block) {  // column-major
          same = scales[at(local * blocks + block, rows, row - local * rows)] == expected.scales[at(block, 1)];
        }
        if (same) continue;
        throw Error(fmt::format("check: row {} of local expert {} of rank {} is not token {} of rank {}",
                                row - local * rows, local, rank, token, source));
      }
    }
    for (int local = 0; local < shape.local_experts(); ++local) {
      const std::int64_t first = begin[at(local, 1)];
      const std::int64_t range = first << 32 | (received[at(local, 1)] - first);
      if (ranges[at(local, shape.ranks, source)] == range) continue;
      throw Error(fmt::format("check: local expert {} of rank {} has the range {:#x} of rank {}, expected {:#x}", local,
                              rank, ranges[at(local, shape.ranks, source)], source, range));
    }
  }
  for (int local = 0; local < shape.local_experts(); ++local) {
    if (counts[at(local, 1)] == received[at(local, 1)]) continue;
    throw Error(fmt::format("check: local expert {} of rank {} received {} rows, expected {}", local, rank,
                            counts[at(local, 1)], received[at(local, 1)]));
  }
}

void check_low_latency_combine(Executor& executor, StreamHandle stream, const WorkloadShape& shape, int rank,
                               LowLatencyCombine kind, const LowLatencyReach& reach,
                               const LowLatencyCombineResult& result) {
  const auto sums = to_host<std::uint16_t>(executor, result.combined_x.view(), stream);
  const std::vector<std::int64_t> selection = make_selection(shape, rank);
  const float step = kind == LowLatencyCombine::logfmt ? std::exp2(32.0f / 510.0f) - 1 : 0.0f;
  const std::vector<int> widths = rail_widths(shape.ranks, kind, reach);
  std::vector<std::uint16_t> x(static_cast<std::size_t>(shape.hidden));
  std::vector<float> parts(static_cast<std::size_t>(shape.ranks));
  for (std::int64_t token = 0; token < shape.tokens; ++token) {
    std::vector<float> copies(static_cast<std::size_t>(shape.ranks), 0);  // of the token on each rank
    for (int k = 0; k < shape.topk; ++k) ++copies[at(selection[at(token, shape.topk, k)] / shape.local_experts(), 1)];
    fill_row_bf16(rank, token, x);
    for (std::int64_t h = 0; h < shape.hidden; ++h) {
      // Whole numbers below 2^24, times a power of two: only the roundings to BF16 count.
      float magnitude = 0;
      for (std::size_t r = 0; r < parts.size(); ++r) {
        parts[r] = rounded(copies[r] * LowLatencyBench::weight(kind) * bf16_to_float(x[at(h, 1)]));
        magnitude += std::fabs(parts[r]);
      }
      const float expected = sum_of(parts, rank, 0);
      const float seen = bf16_to_float(sums[at(token, shape.hidden, h)]);
      // LogFMT-10: a step of the format in each part, and one more rounding that may fall the other way.
      const float allowed = step > 0 ? step * magnitude + 0x1p-7f * std::fabs(expected) + 0x1p-31f : 0;
      if (std::fabs(seen - expected) <= allowed) continue;
      if (std::ranges::any_of(widths, [&](int width) { return sum_of(parts, rank, width) == seen; })) continue;
      throw Error(fmt::format("check: combined token {} of rank {}, channel {}: {}, expected {}", token, rank, h, seen,
                              expected));
    }
  }
}

}  // namespace deep_ep::tools
