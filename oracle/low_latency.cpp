#include "oracle/low_latency.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <stdexcept>

#include "oracle/fp8.hpp"
#include "oracle/nvfp4.hpp"

namespace deep_ep::oracle {
namespace {

std::size_t at(std::int64_t row, std::int64_t width, std::int64_t column = 0) {
  return static_cast<std::size_t>(row * width + column);
}

bool masked(const Masks& masks, int ranks, int who, int whom) {
  return !masks.empty() && masks[at(who, ranks, whom)] != 0;
}

std::span<const std::uint16_t> row_of(const std::vector<std::uint16_t>& x, std::int64_t row, std::int64_t hidden) {
  return std::span(x).subspan(at(row, hidden), static_cast<std::size_t>(hidden));
}

/// Output of one rank with all its rows empty.
LowLatencyReceived empty_output(const LowLatencyShape& shape, RowFormat format) {
  const std::int64_t experts = shape.local_experts();
  const std::int64_t rows = experts * shape.expert_rows();
  LowLatencyReceived output;
  output.count.assign(static_cast<std::size_t>(experts), 0);
  output.layout_range.assign(static_cast<std::size_t>(experts * shape.ranks), 0);
  output.src_info.assign(static_cast<std::size_t>(rows), -1);
  output.x.resize(at(rows, row_bytes(format, shape.hidden)));
  if (shape.hidden != 0) output.scales.resize(at(rows, float_scales(format, shape.hidden)));
  output.packed_scales.resize(at(rows, packed_scales(format, shape.hidden)));
  return output;
}

void place(LowLatencyReceived& output, std::int64_t row, std::int64_t token, const FormattedRow& formatted) {
  const auto copy = [row](const auto& from, auto& to) {
    std::ranges::copy(from, to.begin() + row * static_cast<std::int64_t>(from.size()));
  };
  copy(formatted.x, output.x);
  copy(formatted.scales, output.scales);
  copy(formatted.packed_scales, output.packed_scales);
  output.src_info[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(token);
}

std::int64_t packed_range(std::int64_t begin, std::int64_t count) { return begin << 32 | count; }

/// Rows of `source` for `destination`.
void fill_experts(LowLatencyDispatched& result, LowLatencyReceived& output, const LowLatencyInput& input, int source,
                  int destination, RowFormat format) {
  const LowLatencyShape& shape = result.shape;
  const int topk = input.selection.topk;
  const std::vector<std::int32_t> begin = output.count;
  for (std::int64_t t = 0; t < input.selection.tokens; ++t) {
    for (int k = 0; k < topk; ++k) {
      const std::int64_t expert = input.selection.idx[at(t, topk, k)];
      const std::int64_t local = expert - std::int64_t{destination} * shape.local_experts();
      if (expert < 0 || local < 0 || local >= shape.local_experts()) continue;
      const std::int64_t row = local * shape.expert_rows() + output.count[static_cast<std::size_t>(local)]++;
      place(output, row, t, format_row(row_of(input.x, t, shape.hidden), format));
      result.selection_row[static_cast<std::size_t>(source)][at(t, topk, k)] = row;
    }
  }
  for (int l = 0; l < shape.local_experts(); ++l) {
    const auto i = static_cast<std::size_t>(l);
    output.layout_range[at(l, shape.ranks, source)] = packed_range(begin[i], output.count[i] - begin[i]);
  }
}

/// One rank's part of one token.
struct Part {
  std::vector<float> sent;        ///< as the owner gets it
  std::vector<double> exact;      ///< without rounding
  std::vector<double> magnitude;  ///< sum of the terms' magnitudes
};

Part make_part(std::span<const WeightedRow> rows, std::int64_t hidden, const LowLatencyCombineOptions& options) {
  const auto width = static_cast<std::size_t>(hidden);
  std::vector<float> sums(width, 0.0f);
  Part part{.sent = {}, .exact = std::vector<double>(width, 0.0), .magnitude = std::vector<double>(width, 0.0)};
  for (const WeightedRow& row : rows) {
    for (std::size_t h = 0; h < width; ++h) {
      const float value = bf16_value(row.x[h]);
      sums[h] = options.fused ? std::fma(row.weight, value, sums[h]) : sums[h] + row.weight * value;
      const double product = static_cast<double>(row.weight) * static_cast<double>(value);
      part.exact[h] += product;
      part.magnitude[h] += std::fabs(product);
    }
  }
  for (const float sum : sums) part.sent.push_back(bf16_value(bf16_bits(sum)));
  return part;
}

/// Parts of a token's row, added up.
class RowSum {
 public:
  explicit RowSum(std::int64_t hidden)
      : sums_(static_cast<std::size_t>(hidden), 0.0f), exact_(sums_.size(), 0.0), tolerance_(sums_.size(), 0.0) {}

  void add(const Part& part) {
    for (std::size_t h = 0; h < sums_.size(); ++h) {
      sums_[h] += part.sent[h];
      exact_[h] += part.exact[h];
      // fp32 sums of at most 32 terms, the rounding to bfloat16.
      tolerance_[h] += part.magnitude[h] * (32 * 0x1p-23 + 0x1p-8);
    }
  }

  /// A sum that others have rounded.
  void add_rounded(const RowSum& other) {
    for (std::size_t h = 0; h < sums_.size(); ++h) {
      sums_[h] += bf16_value(bf16_bits(other.sums_[h]));
      exact_[h] += other.exact_[h];
      tolerance_[h] += other.rounded_tolerance(h);
    }
  }

  LowLatencyCombined result() const {
    LowLatencyCombined rounded{{}, exact_, {}};
    for (std::size_t h = 0; h < sums_.size(); ++h) {
      rounded.x.push_back(bf16_bits(sums_[h]));
      rounded.tolerance.push_back(rounded_tolerance(h));
    }
    return rounded;
  }

 private:
  double rounded_tolerance(std::size_t h) const {
    return tolerance_[h] + (std::fabs(exact_[h]) + tolerance_[h]) * 0x1p-8 + 0x1p-126;
  }

  std::vector<float> sums_;
  std::vector<double> exact_;
  std::vector<double> tolerance_;
};

/// The rows that `rank` adds up for the owner's token: of those of its experts that are selected still.
std::vector<WeightedRow> rows_of_rank(const LowLatencyDispatched& dispatched,
                                      std::span<const LowLatencyCombineInput> inputs, const Masks& masks, int owner,
                                      std::int64_t token, std::optional<int> rank) {
  const LowLatencyShape& shape = dispatched.shape;
  std::vector<WeightedRow> rows;
  const auto o = static_cast<std::size_t>(owner);
  const Selection& selection = inputs[o].selection;
  const int topk = selection.topk;
  for (int k = 0; k < topk; ++k) {
    const std::int64_t expert = selection.idx[at(token, topk, k)];
    if (expert < 0 || expert >= shape.experts) continue;
    const auto from_rank = static_cast<int>(expert / shape.local_experts());
    if ((rank && from_rank != *rank) || masked(masks, shape.ranks, owner, from_rank)) continue;
    const std::int64_t row = dispatched.selection_row[o][at(token, topk, k)];
    if (row < 0) continue;
    rows.push_back({row_of(inputs[static_cast<std::size_t>(from_rank)].x, row, shape.hidden),
                    selection.weights.empty() ? 1.0f : selection.weights[at(token, topk, k)]});
  }
  return rows;
}

}  // namespace

const char* name_of(RowFormat format) {
  switch (format) {
    case RowFormat::bf16:
      return "bf16";
    case RowFormat::fp8:
      return "fp8";
    case RowFormat::fp8_rounded:
      return "fp8_rounded";
    case RowFormat::fp8_ue8m0:
      return "fp8_ue8m0";
    case RowFormat::nvfp4:
      return "nvfp4";
    case RowFormat::fp8_aligned:
      return "fp8_aligned";
  }
  return "?";
}

FormattedRow format_row(std::span<const std::uint16_t> row, RowFormat format) {
  FormattedRow result;
  if (row.empty()) return result;
  if (format == RowFormat::nvfp4) {
    std::vector<std::uint8_t> codes(row.size() / 2);
    std::vector<std::uint8_t> scales;
    for (std::size_t begin = 0; begin < row.size(); begin += kNvfp4Block) {
      const auto out = std::span(codes).subspan(begin / 2, kNvfp4Block / 2);
      scales.push_back(cast_nvfp4(row.subspan(begin, kNvfp4Block), kGlobalScale, out));
    }
    const auto bytes = std::as_bytes(std::span(codes));
    result.x.assign(bytes.begin(), bytes.end());
    result.packed_scales.resize(scales.size() / 4);
    std::memcpy(result.packed_scales.data(), scales.data(), 4 * result.packed_scales.size());
    return result;
  }
  if (format == RowFormat::bf16) {
    const auto bytes = std::as_bytes(row);
    result.x.assign(bytes.begin(), bytes.end());
    return result;
  }
  std::vector<std::uint8_t> values(row.size());
  for (std::size_t begin = 0; begin < row.size(); begin += kFp8Block) {
    const auto out = std::span(values).subspan(begin, kFp8Block);
    const auto in = row.subspan(begin, kFp8Block);
    result.scales.push_back(format == RowFormat::fp8_aligned ? cast_fp8_aligned(in, out)
                                                             : cast_fp8(in, format != RowFormat::fp8, out));
  }
  const auto bytes = std::as_bytes(std::span(values));
  result.x.assign(bytes.begin(), bytes.end());
  if (format == RowFormat::fp8_ue8m0) {
    for (std::size_t i = 0; i + 4 <= result.scales.size(); i += 4) {
      result.packed_scales.push_back(pack_ue8m0(std::span<const float>(result.scales).subspan(i, 4)));
    }
    result.scales.clear();
  }
  return result;
}

LowLatencyDispatched low_latency_dispatch(const LowLatencyShape& shape, std::span<const LowLatencyInput> inputs,
                                          RowFormat format, const Masks& masks) {
  if (static_cast<int>(inputs.size()) != shape.ranks || shape.experts % shape.ranks != 0) {
    throw std::invalid_argument("oracle: as many inputs as ranks, and a multiple of that of experts");
  }
  LowLatencyDispatched result;
  result.shape = shape;
  for (const LowLatencyInput& input : inputs) {
    if (input.selection.tokens > shape.max_tokens) throw std::invalid_argument("oracle: more than max_tokens tokens");
    result.selection.push_back(input.selection.idx);
    result.selection_row.emplace_back(input.selection.idx.size(), -1);
  }
  for (int destination = 0; destination < shape.ranks; ++destination) {
    LowLatencyReceived output = empty_output(shape, format);
    for (int source = 0; source < shape.ranks; ++source) {
      if (masked(masks, shape.ranks, source, destination) || masked(masks, shape.ranks, destination, source)) {
        for (int l = 0; l < shape.local_experts(); ++l) {  // an empty block still begins where the next one does
          output.layout_range[at(l, shape.ranks, source)] = packed_range(output.count[static_cast<std::size_t>(l)], 0);
        }
        continue;
      }
      const LowLatencyInput& input = inputs[static_cast<std::size_t>(source)];
      fill_experts(result, output, input, source, destination, format);
    }
    result.received.push_back(std::move(output));
  }
  return result;
}

std::vector<LowLatencyCombined> low_latency_combine(const LowLatencyDispatched& dispatched,
                                                    std::span<const LowLatencyCombineInput> inputs,
                                                    const LowLatencyCombineOptions& options) {
  const LowLatencyShape& shape = dispatched.shape;
  std::vector<LowLatencyCombined> results(inputs.size());
  std::vector<std::vector<WeightedRow>> rows(static_cast<std::size_t>(shape.ranks));
  for (int owner = 0; owner < shape.ranks; ++owner) {
    const auto o = static_cast<std::size_t>(owner);
    for (std::int64_t t = 0; t < inputs[o].selection.tokens; ++t) {
      for (int rank = 0; rank < shape.ranks; ++rank) {
        rows[static_cast<std::size_t>(rank)] = rows_of_rank(dispatched, inputs, options.masks, owner, t, rank);
      }
      if (options.unreduced) {  // all at the owner, as if they were its own
        for (auto& of_rank : rows) of_rank.clear();
        rows[o] = rows_of_rank(dispatched, inputs, options.masks, owner, t, std::nullopt);
      }
      const LowLatencyCombined one = low_latency_combine_token(owner, rows, shape.hidden, options);
      results[o].x.insert(results[o].x.end(), one.x.begin(), one.x.end());
      results[o].sum.insert(results[o].sum.end(), one.sum.begin(), one.sum.end());
      results[o].tolerance.insert(results[o].tolerance.end(), one.tolerance.begin(), one.tolerance.end());
    }
  }
  return results;
}

LowLatencyCombined low_latency_combine_token(int owner, std::span<const std::vector<WeightedRow>> rows_of_ranks,
                                             std::int64_t hidden, const LowLatencyCombineOptions& options) {
  const int ranks = static_cast<int>(rows_of_ranks.size());
  const int width = options.ranks_per_node;
  if (width < 0 || (width > 0 && ranks % width != 0)) {
    throw std::invalid_argument("oracle: ranks_per_node divides the number of ranks");
  }
  RowSum sum(hidden);
  std::optional<RowSum> of_node;  // of a node whose ranks' parts come as one
  for (int rank = 0; rank < ranks; ++rank) {
    const bool together = width > 0 && rank / width != owner / width;
    const std::vector<WeightedRow>& rows = rows_of_ranks[static_cast<std::size_t>(rank)];
    if (!rows.empty()) {
      if (together && !of_node) of_node.emplace(hidden);
      (together ? *of_node : sum).add(make_part(rows, hidden, options));
    }
    if (of_node && (rank + 1) % width == 0) {
      sum.add_rounded(*of_node);
      of_node.reset();
    }
  }
  return sum.result();
}

}  // namespace deep_ep::oracle
