#include "oracle/low_latency.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
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

/// Rows of `source` for `destination`; none where they are `apart`: one has masked the other.
void fill_experts(LowLatencyDispatched& result, LowLatencyReceived& output, const Selection& selection, int source,
                  int destination, bool apart) {
  const LowLatencyShape& shape = result.shape;
  const std::vector<std::int32_t> begin = output.count;
  for (std::int64_t t = 0; t < selection.tokens && !apart; ++t) {
    for (int k = 0; k < selection.topk; ++k) {
      const std::int64_t expert = selection.idx[at(t, selection.topk, k)];
      const std::int64_t local = expert - std::int64_t{destination} * shape.local_experts();
      if (expert < 0 || local < 0 || local >= shape.local_experts()) continue;
      const std::int64_t row = local * shape.expert_rows() + output.count[static_cast<std::size_t>(local)]++;
      output.src_info[static_cast<std::size_t>(row)] = static_cast<std::int32_t>(t);
      result.selection_row[static_cast<std::size_t>(source)][at(t, selection.topk, k)] = row;
    }
  }
  for (int l = 0; l < shape.local_experts(); ++l) {  // an empty block still begins where the next one does
    const auto i = static_cast<std::size_t>(l);
    output.layout_range[at(l, shape.ranks, source)] = std::int64_t{begin[i]} << 32 | (output.count[i] - begin[i]);
  }
}

}  // namespace

const char* name_of(RowFormat format) {
  constexpr const char* kNames[] = {"bf16", "fp8", "fp8_rounded", "fp8_ue8m0", "nvfp4", "fp8_aligned"};
  return kNames[static_cast<std::size_t>(format)];
}

FormattedRow format_row(Row row, RowFormat format) {
  const auto hidden = static_cast<std::int64_t>(row.size());
  FormattedRow result{.x = std::vector<std::byte>(at(row_bytes(format, hidden), 1)),
                      .scales = std::vector<std::uint32_t>(at(scale_words(format, hidden), 1))};
  if (format == RowFormat::bf16) {
    std::ranges::copy(std::as_bytes(row), result.x.begin());
    return result;
  }
  const std::span codes(reinterpret_cast<std::uint8_t*>(result.x.data()), result.x.size());
  const auto put_byte = [&](std::size_t i, std::uint8_t scale) {
    result.scales[i / 4] |= std::uint32_t{scale} << i % 4 * 8;
  };
  if (format == RowFormat::nvfp4) {
    for (std::size_t i = 0; i < row.size() / kNvfp4Block; ++i) {
      const auto out = codes.subspan(i * kNvfp4Block / 2, kNvfp4Block / 2);
      put_byte(i, cast_nvfp4(row.subspan(i * kNvfp4Block, kNvfp4Block), kGlobalScale, out));
    }
    return result;
  }
  for (std::size_t i = 0; i < row.size() / kFp8Block; ++i) {
    const auto in = row.subspan(i * kFp8Block, kFp8Block);
    const auto out = codes.subspan(i * kFp8Block, kFp8Block);
    const float scale =
        format == RowFormat::fp8_aligned ? cast_fp8_aligned(in, out) : cast_fp8(in, format != RowFormat::fp8, out);
    if (format == RowFormat::fp8_ue8m0) {
      put_byte(i, ue8m0_bits(scale));
    } else {
      result.scales[i] = std::bit_cast<std::uint32_t>(scale);
    }
  }
  return result;
}

LowLatencyDispatched low_latency_dispatch(const LowLatencyShape& shape, std::span<const Selection> selections,
                                          const Masks& masks) {
  if (static_cast<int>(selections.size()) != shape.ranks || shape.experts % shape.ranks != 0) {
    throw std::invalid_argument("oracle: as many inputs as ranks, and a multiple of that of experts");
  }
  LowLatencyDispatched result;
  result.shape = shape;
  for (const Selection& selection : selections) {
    if (selection.tokens > shape.max_tokens) throw std::invalid_argument("oracle: more than max_tokens tokens");
    result.selection.push_back(selection.idx);
    result.selection_row.emplace_back(selection.idx.size(), -1);
  }
  const int experts = shape.local_experts();
  for (int destination = 0; destination < shape.ranks; ++destination) {
    LowLatencyReceived output;
    output.count.assign(at(experts, 1), 0);
    output.layout_range.assign(at(experts, shape.ranks), 0);
    output.src_info.assign(at(experts, shape.expert_rows()), -1);
    for (int source = 0; source < shape.ranks; ++source) {
      const bool apart =
          masked(masks, shape.ranks, source, destination) || masked(masks, shape.ranks, destination, source);
      fill_experts(result, output, selections[static_cast<std::size_t>(source)], source, destination, apart);
    }
    result.received.push_back(std::move(output));
  }
  return result;
}

std::string difference(const LowLatencyShape& shape, RowFormat format, const LowLatencyReceived& expected,
                       const LowLatencyOutput& seen, const std::function<Row(int source, std::int64_t token)>& sent) {
  const auto text = [](auto number) { return std::to_string(number); };
  const std::int64_t rows = shape.expert_rows();
  const bool in_tiles = format == RowFormat::nvfp4;
  for (int l = 0; l < shape.local_experts(); ++l) {
    const std::string here = " of local expert " + text(l);
    const std::int32_t count = expected.count[at(l, 1)];
    if (seen.routes.count.at(at(l, 1)) != count) {
      return text(seen.routes.count[at(l, 1)]) + " rows" + here + ", expected " + text(count);
    }
    for (int source = 0; source < shape.ranks; ++source) {
      const std::int64_t range = expected.layout_range[at(l, shape.ranks, source)];
      const std::int64_t begin = range >> 32, end = begin + (range & 0xffffffff);
      if (const std::int64_t other = seen.routes.layout_range.at(at(l, shape.ranks, source)); other != range) {
        return "rows " + text(other >> 32) + " + " + text(other & 0xffffffff) + here + " are of rank " + text(source) +
               ", expected " + text(begin) + " + " + text(end - begin);
      }
      for (std::int64_t row = begin; row < end; ++row) {
        const std::int32_t token = expected.src_info[at(l, rows, row)];
        const FormattedRow right = format_row(sent(source, token), format);
        const auto width = static_cast<std::int64_t>(right.x.size());
        const auto words = static_cast<std::int64_t>(right.scales.size());
        bool same = seen.routes.src_info.at(at(l, rows, row)) == token &&
                    seen.x.size() == at(shape.local_experts() * rows, width) &&
                    std::ranges::equal(right.x, std::span(seen.x).subspan(at(l * rows + row, width), right.x.size()));
        for (std::int64_t word = 0; same && word < words; ++word) {
          const std::int64_t tile = (l * ((rows + 127) / 128) + row / 128) * words + word;
          const std::size_t place =
              in_tiles ? at(tile, 128, row % 32 * 4 + row % 128 / 32) : at(l * words + word, rows, row);
          same = seen.scales.at(place) == right.scales[at(word, 1)];
        }
        if (!same) {
          return "row " + text(row) + here + " is not token " + text(token) + " of rank " + text(source);
        }
      }
    }
  }
  return {};
}

namespace {

float rounded_to(int bits, float value) {
  const int dropped = 32 - bits;
  if (dropped == 0 || !std::isfinite(value) || value == 0) return value;
  // To nearest, ties away from zero, in steps of the last bit that is kept.
  const int exponent = std::max(std::ilogb(value), -126);
  const double step = std::ldexp(1.0, exponent - 23 + dropped);
  const double rounded = std::round(static_cast<double>(value) / step) * step;
  return std::fabs(rounded) >= 0x1p128 ? std::copysign(std::numeric_limits<float>::infinity(), value)
                                       : static_cast<float>(rounded);
}

}  // namespace

Combined low_latency_sum(std::span<const std::vector<WeightedRow>> rows_of_ranks, std::int64_t hidden,
                         const LowLatencyCombineOptions& options) {
  const std::size_t ranks = rows_of_ranks.size();
  const std::size_t width = options.ranks_per_node == 0 ? ranks : static_cast<std::size_t>(options.ranks_per_node);
  Combined result;
  for (std::size_t h = 0; h < static_cast<std::size_t>(hidden); ++h) {
    float total = 0;
    double exact = 0, magnitude = 0;
    for (std::size_t node = 0; node < ranks; node += width) {
      float of_node = 0;
      std::size_t rows_of_node = 0;
      for (const std::vector<WeightedRow>& rows : rows_of_ranks.subspan(node, width)) {
        float of_rank = 0;
        for (const WeightedRow& row : rows) {
          const float value = bf16_value(row.x[h]);
          of_rank = std::fma(row.weight, value, of_rank);
          const double product = static_cast<double>(row.weight) * static_cast<double>(value);
          exact += product;
          magnitude += std::fabs(product);
        }
        of_node += rows.size() > 1 ? rounded_to(options.sum_bits, of_rank) : of_rank;
        rows_of_node += rows.size();
      }
      total += width < ranks && rows_of_node > 1 ? rounded_to(options.sum_bits, of_node) : of_node;
    }
    // Two roundings of sums, those of up to 64 additions in fp32, and the last one.
    const double sums = magnitude * (std::ldexp(2.0, 8 - options.sum_bits) + 64 * 0x1p-24);
    result.x.push_back(bf16_bits(total));
    result.sum.push_back(exact);
    result.tolerance.push_back(sums + (std::fabs(exact) + sums) * 0x1p-8 + 0x1p-126);
  }
  return result;
}

std::vector<Combined> low_latency_combine(const LowLatencyDispatched& dispatched,
                                          std::span<const LowLatencyCombineInput> inputs, std::int64_t hidden,
                                          const LowLatencyCombineOptions& options) {
  const LowLatencyShape& shape = dispatched.shape;
  std::vector<Combined> results(inputs.size());
  std::vector<std::vector<WeightedRow>> rows(static_cast<std::size_t>(shape.ranks));
  for (int owner = 0; owner < shape.ranks; ++owner) {
    const auto o = static_cast<std::size_t>(owner);
    const Selection& selection = inputs[o].selection;
    for (std::int64_t t = 0; t < selection.tokens; ++t) {
      for (auto& of_rank : rows) of_rank.clear();
      for (int k = 0; k < selection.topk; ++k) {
        const std::size_t one = at(t, selection.topk, k);
        const std::int64_t expert = selection.idx[one];
        if (expert < 0 || expert >= shape.experts) continue;
        const auto rank = static_cast<int>(expert / shape.local_experts());
        const std::int64_t row = dispatched.selection_row[o][one];
        if (row < 0 || masked(options.masks, shape.ranks, owner, rank)) continue;
        const auto r = static_cast<std::size_t>(rank);
        rows[r].push_back({Row(inputs[r].x).subspan(at(row, hidden), at(hidden, 1)),
                           selection.weights.empty() ? 1.0f : selection.weights[one]});
      }
      results[o].append(low_latency_sum(rows, hidden, options));
    }
  }
  return results;
}

}  // namespace deep_ep::oracle
