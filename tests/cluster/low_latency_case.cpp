#include "tests/cluster/low_latency_case.hpp"

#include <fmt/ranges.h>

#include <algorithm>
#include <string>

#include "csrc/bootstrap/agreement.hpp"
#include "deep_ep/error.hpp"
#include "tests/cluster/case.hpp"

namespace deep_ep::test {
namespace {

/// Rows, tokens and positions of the handle's table are those of the sources' selections.
void check_row_table(Rank& rank, const LowLatencyCase& one, const LowLatencyDispatchResult& result) {
  const LowLatencyCaseShape& shape = one.shape;
  const std::int64_t ranks = shape.ranks();
  const std::int64_t topk = shape.topk;
  const TensorView table_view = result.handle.row_table.view();
  require(table_view.size(0) == 2 + shape.max_tokens * (1 + topk) && table_view.size(1) == ranks,
          "shape of row_table: " + table_view.describe());
  const auto table = rank.download<std::int32_t>(table_view);
  for (std::int64_t source = 0; source < ranks; ++source) {
    const auto& rows = one.dispatched.selection_row[index(source)];
    const auto& selection = one.dispatched.selection[index(source)];
    std::int64_t row = 0;
    for (std::int64_t token = 0; token < shape.tokens[index(source)]; ++token) {
      std::vector<std::int32_t> wanted(index(topk), -1);
      bool here = false;
      for (std::int64_t k = 0; k < topk; ++k) {
        const std::int64_t at = token * topk + k;
        if (rows[index(at)] < 0 || selection[index(at)] / shape.local_experts != rank.rank()) continue;
        wanted[index(k)] = static_cast<std::int32_t>(rows[index(at)]);
        here = true;
      }
      if (!here) continue;
      const std::int64_t slot = source * shape.max_tokens + row++;
      require(table[index(ranks + slot)] == token, "row_table: token of row " + std::to_string(slot));
      const auto begin = table.begin() + ranks + ranks * shape.max_tokens + slot * topk;
      require_same(wanted, std::vector<std::int32_t>(begin, begin + topk), "row_table: positions of a row");
    }
    require(table[index(source)] == row, "row_table: rows of source " + std::to_string(source));
  }
}

}  // namespace

std::string LowLatencyCaseShape::describe() const {
  return fmt::format("tokens {}, max_tokens {}, hidden {}, local experts {}, top-{}, routing {}, {}, seed {}",
                     fmt::join(tokens, " "), max_tokens, hidden, local_experts, topk, oracle::name_of(routing),
                     oracle::name_of(format), seed);
}

LowLatencyCase make_low_latency_case(const LowLatencyCaseShape& shape) {
  LowLatencyCase one{.shape = shape, .selections = {}, .x = {}, .dispatched = {}};
  for (std::size_t r = 0; r < shape.tokens.size(); ++r) {
    const std::uint64_t seed = oracle::derive_seed(shape.seed, r);
    one.selections.push_back(oracle::make_selection(shape.routing, shape.tokens[r], shape.topk, shape.experts(), seed));
    std::vector<std::uint16_t>& x = one.x.emplace_back(random_bf16(shape.tokens[r] * shape.hidden, seed));
    // What shows rounding and clamping: blocks of zeros, of one magnitude, of very small numbers.
    oracle::Random random(seed + 1);
    for (std::size_t at = 0; at + 128 <= x.size(); at += 128) {
      const std::int64_t kind = random.below(8);
      for (std::size_t i = at; kind < 3 && i < at + 128; ++i) {
        x[i] = kind == 0 ? 0 : kind == 1 ? oracle::bf16_bits(i % 2 == 0 ? 4.0f : -4.0f) : oracle::bf16_bits(3e-6f);
      }
    }
  }
  return with_masks(one, shape.masks);
}

LowLatencyCase with_masks(const LowLatencyCase& one, const oracle::Masks& masks) {
  LowLatencyCase result = one;
  const LowLatencyCaseShape& shape = one.shape;
  result.shape.masks = masks;
  result.dispatched = oracle::low_latency_dispatch(
      {.ranks = shape.ranks(), .experts = shape.experts(), .max_tokens = shape.max_tokens}, one.selections, masks);
  return result;
}

oracle::Masks masks_without(int ranks, int lost) {
  oracle::Masks masks(index(ranks * ranks), 0);
  for (int rank = 0; rank < ranks; ++rank) masks[index(rank * ranks + lost)] = rank != lost;
  return masks;
}

LowLatencyCaseShape random_low_latency_shape(int ranks, std::uint64_t seed, const RandomShapeLimits& limits) {
  oracle::Random random(seed);
  LowLatencyCaseShape shape;
  shape.max_tokens = 1 + random.below(random.chance(0.2) ? limits.many_tokens : limits.tokens);
  shape.tokens = oracle::make_token_counts(random.pick(oracle::kTokenCounts), ranks, shape.max_tokens, seed);
  static constexpr std::int64_t kHidden[] = {128, 128, 256, 384, 512, 512, 1024, 2048, 2560, 7168, 8192};
  do {
    shape.hidden = random.pick(kHidden);
  } while (shape.hidden > limits.hidden);
  shape.local_experts = static_cast<int>(1 + random.below(limits.local_experts));
  shape.topk = static_cast<int>(1 + random.below(random.chance(0.2) ? 32 : 8));
  shape.routing = random.pick(oracle::kRoutings);
  shape.topk = std::min(shape.topk, shape.experts());
  // Tokens may name an expert several times: its part of the output must have room for that.
  if (shape.routing == oracle::Routing::duplicates || shape.routing == oracle::Routing::skewed) {
    shape.max_tokens *= shape.topk;
  }
  shape.format = random.pick(oracle::kRowFormats);
  if (shape.format == oracle::RowFormat::fp8_ue8m0) shape.hidden = (shape.hidden + 511) / 512 * 512;
  shape.idx_dtype = random.chance(0.3) ? DType::int32 : DType::int64;
  shape.seed = seed;
  return shape;
}

LowLatencyDispatchArguments upload_arguments(Rank& rank, const LowLatencyCase& one) {
  const LowLatencyCaseShape& shape = one.shape;
  const std::int64_t tokens = shape.tokens[index(rank.rank())];
  LowLatencyDispatchArguments arguments;
  arguments.x = rank.upload(one.x[index(rank.rank())], DType::bfloat16, {tokens, shape.hidden});
  arguments.topk_idx =
      rank.upload_indices(one.selections[index(rank.rank())].idx, shape.idx_dtype, {tokens, shape.topk});
  arguments.max_tokens = static_cast<int>(shape.max_tokens);
  arguments.num_experts = shape.experts();
  static_assert(static_cast<int>(LowLatencyFormat::fp8_aligned) == static_cast<int>(oracle::RowFormat::fp8_aligned));
  arguments.format = static_cast<LowLatencyFormat>(shape.format);  // in the same order
  if (arguments.format == LowLatencyFormat::nvfp4) {
    arguments.x_global_scale = rank.upload(std::vector<float>{oracle::kGlobalScale}, DType::float32, {1});
  }
  return arguments;
}

void check_low_latency_dispatch(Rank& rank, const LowLatencyCase& one, const LowLatencyDispatchResult& result) {
  const LowLatencyCaseShape& shape = one.shape;
  oracle::LowLatencyOutput seen{.routes = {rank.download<std::int32_t>(result.recv_count.view()),
                                           rank.download<std::int64_t>(result.handle.layout_range.view()),
                                           rank.download<std::int32_t>(result.handle.src_info.view())},
                                .x = rank.download_bytes(result.recv_x.view()),
                                .scales = {}};
  require(result.recv_x_scales.has_value() == (shape.format != oracle::RowFormat::bf16),
          "recv_x_scales come with all rows but bfloat16");
  if (result.recv_x_scales) {
    const TensorView& scales = result.recv_x_scales->view();
    const std::int64_t rows = result.recv_x.size(1);
    require(shape.format == oracle::RowFormat::nvfp4
                ? scales.size(1) == (rows + 127) / 128 && scales.size(3) == 512
                : scales.stride(0) == rows * scales.size(2) && scales.stride(1) == 1 && scales.stride(2) == rows,
            "scales are column-major, or in tiles: " + scales.describe());
    const std::int64_t words = static_cast<std::int64_t>(scales.bytes()) / 4;
    seen.scales =
        rank.download<std::uint32_t>(TensorView::contiguous(scales.data, DType::int32, {words}, scales.device));
  }
  const auto sent = [&](int source, std::int64_t token) {
    return oracle::Row(one.x[index(source)]).subspan(index(token * shape.hidden), index(shape.hidden));
  };
  const std::string wrong =
      oracle::difference(one.dispatched.shape, shape.format, one.dispatched.received[index(rank.rank())], seen, sent);
  require(wrong.empty(), wrong);
  if (shape.masks.empty()) check_row_table(rank, one, result);
}

std::vector<std::int32_t> query_masks(Rank& rank, Buffer& buffer) {
  const TensorView status = rank.upload(std::vector<std::int32_t>(index(rank.size()), -7), DType::int32, {rank.size()});
  buffer.low_latency_query_mask(status, rank.call().stream);
  return rank.download<std::int32_t>(status);
}

void require_one_left_out(Rank& rank, Buffer& buffer, const LowLatencyCase& one) {
  std::int32_t left_out = 0;
  for (int call = 0; call < 3; ++call) {
    try {
      if (left_out == 0) buffer.low_latency_dispatch(upload_arguments(rank, one), rank.call());
      rank.executor()->synchronize(rank.stream());
      if (left_out == 0) buffer.check();
    } catch (const TimeoutError& error) {
      require(std::string(error.what()).find("low_latency_resume") != std::string::npos, error.what());
      left_out = 1;
    }
    rank.bootstrap()->barrier();  // a rank that has waited in vain is not late for the next call
  }
  const std::vector<std::int32_t> masks = query_masks(rank, buffer);
  const std::vector<std::int32_t> expected = all_gather_values(*rank.bootstrap(), left_out);
  require(std::count(expected.begin(), expected.end(), 1) == 1, "one rank is left out");
  // The one that is left out may have masked the other before it was told.
  if (left_out == 0) require_same(expected, masks, "masks");
}

LowLatencyDispatchResult dispatch_and_check(Rank& rank, Buffer& buffer, const LowLatencyCase& one, int num_sms) {
  LowLatencyDispatchArguments arguments = upload_arguments(rank, one);
  arguments.num_sms = num_sms;
  LowLatencyDispatchResult result = buffer.low_latency_dispatch(arguments, rank.call());
  try {
    check_low_latency_dispatch(rank, one, result);
  } catch (const CheckFailure& failure) {
    throw CheckFailure(one.shape.describe() + ": " + failure.what());
  }
  return result;
}

BufferOptions low_latency_options(int ranks, std::int64_t max_tokens, std::int64_t hidden, double timeout_s,
                                  bool masking) {
  const int tokens = static_cast<int>(std::max<std::int64_t>(max_tokens, 1));
  BufferOptions options{
      .heap_bytes = std::size_t{4} << 20,
      .max_local_experts = 64,
      .low_latency = {.bytes = Buffer::low_latency_bytes_hint(tokens, hidden, ranks, 1), .masking = masking}};
  if (timeout_s > 0) options.timeout_s = timeout_s;
  return options;
}

void run_dispatches(const ClusterOptions& cluster, const std::vector<LowLatencyCase>& cases,
                    const std::vector<int>& sms) {
  std::int64_t max_tokens = 1;
  std::int64_t hidden = 1;
  for (const LowLatencyCase& one : cases) {
    max_tokens = std::max(max_tokens, one.shape.max_tokens);
    hidden = std::max(hidden, one.shape.hidden);
  }
  run_cluster(cluster, [&](Rank& rank) {
    Buffer& buffer = rank.buffer(low_latency_options(rank.size(), max_tokens, hidden));
    for (std::size_t i = 0; i < cases.size(); ++i) {
      dispatch_and_check(rank, buffer, cases[i], sms[i % sms.size()]);
      rank.release();
    }
    buffer.check();
    buffer.destroy();
  });
}

}  // namespace deep_ep::test
