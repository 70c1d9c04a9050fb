#include "oracle/low_latency.hpp"

#include <algorithm>
#include <cstring>
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

/// Rows of `source` for `destination`; none where they are `apart`: one has masked the other.
void fill_experts(LowLatencyDispatched& result, LowLatencyReceived& output, const LowLatencyInput& input, int source,
                  int destination, RowFormat format, bool apart) {
  const LowLatencyShape& shape = result.shape;
  const int topk = input.selection.topk;
  const std::vector<std::int32_t> begin = output.count;
  for (std::int64_t t = 0; t < input.selection.tokens && !apart; ++t) {
    for (int k = 0; k < topk; ++k) {
      const std::int64_t expert = input.selection.idx[at(t, topk, k)];
      const std::int64_t local = expert - std::int64_t{destination} * shape.local_experts();
      if (expert < 0 || local < 0 || local >= shape.local_experts()) continue;
      const std::int64_t row = local * shape.expert_rows() + output.count[static_cast<std::size_t>(local)]++;
      place(output, row, t, format_row(row_of(input.x, t, shape.hidden), format));
      result.selection_row[static_cast<std::size_t>(source)][at(t, topk, k)] = row;
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

FormattedRow format_row(std::span<const std::uint16_t> row, RowFormat format) {
  FormattedRow result;
  if (row.empty()) return result;
  result.x.resize(static_cast<std::size_t>(row_bytes(format, static_cast<std::int64_t>(row.size()))));
  const std::span codes(reinterpret_cast<std::uint8_t*>(result.x.data()), result.x.size());
  if (format == RowFormat::bf16) {
    std::ranges::copy(std::as_bytes(row), result.x.begin());
    return result;
  }
  if (format == RowFormat::nvfp4) {
    std::vector<std::uint8_t> scales;
    for (std::size_t begin = 0; begin < row.size(); begin += kNvfp4Block) {
      const auto out = codes.subspan(begin / 2, kNvfp4Block / 2);
      scales.push_back(cast_nvfp4(row.subspan(begin, kNvfp4Block), kGlobalScale, out));
    }
    result.packed_scales.resize(scales.size() / 4);
    std::memcpy(result.packed_scales.data(), scales.data(), 4 * result.packed_scales.size());
    return result;
  }
  for (std::size_t begin = 0; begin < row.size(); begin += kFp8Block) {
    const auto out = codes.subspan(begin, kFp8Block);
    const auto in = row.subspan(begin, kFp8Block);
    result.scales.push_back(format == RowFormat::fp8_aligned ? cast_fp8_aligned(in, out)
                                                             : cast_fp8(in, format != RowFormat::fp8, out));
  }
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
      const bool apart =
          masked(masks, shape.ranks, source, destination) || masked(masks, shape.ranks, destination, source);
      fill_experts(result, output, inputs[static_cast<std::size_t>(source)], source, destination, format, apart);
    }
    result.received.push_back(std::move(output));
  }
  return result;
}

std::vector<Combined> low_latency_combine(const LowLatencyDispatched& dispatched,
                                          std::span<const LowLatencyCombineInput> inputs,
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
        rows[options.unreduced ? o : r].push_back(  // all at the owner, as if they were its own
            {row_of(inputs[r].x, row, shape.hidden), selection.weights.empty() ? 1.0f : selection.weights[one]});
      }
      results[o].append(combine_row(owner, rows, shape.hidden, options.ranks_per_node, options.fused));
    }
  }
  return results;
}

}  // namespace deep_ep::oracle
