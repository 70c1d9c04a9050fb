#include "tools/bench/low_latency_rank.hpp"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::tools {
namespace {

BufferOptions with_sizes(BufferOptions options, const WorkloadShape& shape) {
  options.heap_bytes = std::size_t{64} << 20;
  options.low_latency.bytes =
      Buffer::low_latency_bytes_hint(static_cast<int>(shape.tokens), shape.hidden, shape.ranks, shape.experts);
  return options;
}

std::size_t at(std::int64_t row, std::int64_t width, std::int64_t column = 0) {
  return static_cast<std::size_t>(row * width + column);
}

/// Which rows `rank` must receive; not their bytes, which may be more than the host likes.
oracle::LowLatencyReceived routes_to(const WorkloadShape& shape, int rank) {
  std::vector<oracle::LowLatencyInput> inputs;
  for (int source = 0; source < shape.ranks; ++source) {
    inputs.push_back({{shape.tokens, shape.topk, make_selection(shape, source), {}}, {}});
  }
  auto routes =
      oracle::low_latency_dispatch({shape.ranks, shape.experts, 0, shape.tokens}, inputs, oracle::RowFormat::bf16);
  return std::move(routes.received[at(rank, 1)]);
}

/// The first channel of a combined row that is not as expected; its length where all are.
std::size_t first_wrong(std::span<const std::uint16_t> row, const oracle::Combined& expected) {
  for (std::size_t h = 0; h < row.size(); ++h) {
    if (oracle::bf16_value(row[h]) != oracle::bf16_value(expected.x[h])) return h;
  }
  return row.size();
}

}  // namespace

LowLatencyRank::LowLatencyRank(const RankTask& task, const BufferOptions& base, bool weights)
    : shape_(task.shape),
      rank_(task.rank()),
      options_(with_sizes(base, shape_)),
      gives_weights_(weights),
      executor_(*task.executor),
      stream_(executor_),
      buffer_(task.bootstrap, task.executor, options_),
      x_(executor_, DType::bfloat16, {shape_.tokens, shape_.hidden}),
      kept_x_(executor_, DType::bfloat16, {shape_.tokens, shape_.hidden}),
      selection_(executor_, DType::int64, {shape_.tokens, shape_.topk}),
      weights_(executor_, DType::float32, {shape_.tokens, shape_.topk}),
      global_scale_(executor_, DType::float32, {1}) {
  const auto x = filled_rows<std::uint16_t>(shape_, rank_, shape_.hidden, fill_row_bf16);
  x_.upload(x.data(), stream_);
  kept_x_.upload(x.data(), stream_);
  selection_.upload(make_selection(shape_, rank_).data(), stream_);
  global_scale_.upload(&oracle::kGlobalScale, stream_);
  weights_.upload(std::vector<float>(weights_.view().bytes() / sizeof(float), 1.0f).data(), stream_);
}

LowLatencyDispatchResult LowLatencyRank::dispatch(oracle::RowFormat format, bool hook) {
  LowLatencyDispatchArguments arguments;
  arguments.x = x_.view();
  arguments.topk_idx = selection_.view();
  arguments.max_tokens = static_cast<int>(shape_.tokens);
  arguments.num_experts = shape_.experts;
  arguments.format = static_cast<LowLatencyFormat>(format);  // in the same order
  if (format == oracle::RowFormat::nvfp4) arguments.x_global_scale = global_scale_.view();
  if (gives_weights_) arguments.combine_weights = weights_.view();
  arguments.return_recv_hook = hook;
  return buffer_.low_latency_dispatch(arguments, {.stream = stream_});
}

LowLatencyCombineResult LowLatencyRank::combine(bool zero_copy, bool hook) {
  LowLatencyCombineArguments arguments;
  arguments.x = zero_copy ? buffer_.low_latency_combine_buffer(handle_) : rows_.value().view();
  arguments.topk_idx = selection_.view();
  arguments.topk_weights = weights_.view();
  arguments.handle = &handle_;
  arguments.return_recv_hook = hook;
  return buffer_.low_latency_combine(arguments, {.stream = stream_});
}

void LowLatencyRank::receive_for_combine() {
  const LowLatencyDispatchResult received = dispatch(oracle::RowFormat::bf16);
  handle_ = received.handle;
  const TensorView& rows = received.recv_x.view();
  if (!rows_) {  // it keeps its place, which graphs have recorded
    rows_.emplace(executor_, rows.dtype, std::initializer_list<std::int64_t>{rows.size(0), rows.size(1), rows.size(2)});
  }
  executor_.copy(rows_->view().data, rows.data, rows.bytes(), stream_);
  executor_.copy(buffer_.low_latency_combine_buffer(handle_).data, rows.data, rows.bytes(), stream_);
  executor_.synchronize(stream_);
}

void LowLatencyRank::spoil() {
  constexpr int kOther = 0x3c;  // 0x3c3c is a bfloat16 that no workload has
  executor_.fill(x_.view().data, kOther, x_.view().bytes(), stream_);
  if (!rows_) return;
  executor_.fill(rows_->view().data, kOther, rows_->view().bytes(), stream_);
  const TensorView zero_copy = buffer_.low_latency_combine_buffer(handle_);
  executor_.fill(zero_copy.data, kOther, zero_copy.bytes(), stream_);
}

void LowLatencyRank::restore() {
  executor_.copy(x_.view().data, kept_x_.view().data, x_.view().bytes(), stream_);
  if (rows_) receive_for_combine();
}

void LowLatencyRank::check_dispatched(oracle::RowFormat format, const LowLatencyDispatchResult& result) {
  const WorkloadShape& shape = shape_;
  const oracle::LowLatencyReceived expected = routes_to(shape, rank_);
  const auto fetch = [&]<class T>(const Tensor& tensor, T) { return to_host<T>(executor_, tensor.view(), stream_); };
  const auto x = fetch(result.recv_x, std::byte{});
  const std::int64_t blocks = oracle::float_scales(format, shape.hidden);
  const std::int64_t columns = oracle::packed_scales(format, shape.hidden);  // of NVFP4
  const auto scales = blocks != 0 ? fetch(result.recv_x_scales.value(), float{}) : std::vector<float>{};
  const auto tiles = columns != 0 ? fetch(result.recv_x_scales.value(), std::int32_t{}) : std::vector<std::int32_t>{};
  const auto counts = fetch(result.recv_count, std::int32_t{});
  const auto src_info = fetch(result.handle.src_info, std::int32_t{});
  const auto ranges = fetch(result.handle.layout_range, std::int64_t{});
  const std::int64_t rows = shape.ranks * shape.tokens;  // of one expert
  std::vector<std::uint16_t> token_x(static_cast<std::size_t>(shape.hidden));

  const auto check_row = [&](std::int64_t local, std::int64_t row, int source) {
    const std::int32_t token = expected.src_info[at(local, rows, row)];
    fill_row_bf16(source, token, token_x);
    const auto right = oracle::format_row(token_x, format);
    const auto bytes = static_cast<std::int64_t>(right.x.size());
    bool same = std::memcmp(x.data() + at(local * rows + row, bytes), right.x.data(), right.x.size()) == 0 &&
                src_info[at(local, rows, row)] == token;
    for (std::int64_t block = 0; same && block < blocks; ++block) {  // column-major
      same = scales[at(local * blocks + block, rows, row)] == right.scales[at(block, 1)];
    }
    for (std::int64_t column = 0; same && column < columns; ++column) {
      const std::int64_t tile = (local * ((rows + 127) / 128) + row / 128) * columns + column;
      same = tiles[at(tile, 128, row % 32 * 4 + row % 128 / 32)] == right.packed_scales[at(column, 1)];
    }
    if (same) return;
    fail<Error>("check: row {} of local expert {} of rank {} is not token {} of rank {}", row, local, rank_, token,
                source);
  };
  for (int local = 0; local < shape.local_experts(); ++local) {
    for (int source = 0; source < shape.ranks; ++source) {
      const std::int64_t seen = ranges[at(local, shape.ranks, source)];
      const std::int64_t range = expected.layout_range[at(local, shape.ranks, source)];
      if (seen != range) {
        fail<Error>("check: local expert {} of rank {} has the range {:#x} of rank {}, expected {:#x}", local, rank_,
                    seen, source, range);
      }
      const std::int64_t begin = range >> 32;
      const std::int64_t end = begin + (range & 0xffffffff);
      for (std::int64_t row = begin; row < end; ++row) check_row(local, row, source);
    }
    if (counts[at(local, 1)] == expected.count[at(local, 1)]) continue;
    fail<Error>("check: local expert {} of rank {} received {} rows, expected {}", local, rank_, counts[at(local, 1)],
                expected.count[at(local, 1)]);
  }
}

/// How many ranks a node may have if combine may go by rails.
std::vector<int> LowLatencyRank::rail_widths() const {
  const auto& low_latency = options_.low_latency;
  std::vector<int> widths;
  const bool none = low_latency.rails == LowLatencyRails::never || !low_latency.allow_nvlink || low_latency.masking;
  if (none) return widths;
  for (int width = 2; width < shape_.ranks; ++width) {
    const bool possible = options_.ranks_per_node == 0 ? shape_.ranks % width == 0 : width == options_.ranks_per_node;
    if (possible) widths.push_back(width);
  }
  return widths;
}

void LowLatencyRank::check_combined(const LowLatencyCombineResult& result) {
  const WorkloadShape& shape = shape_;
  const auto sums = to_host<std::uint16_t>(executor_, result.combined_x.view(), stream_);
  const std::vector<std::int64_t> selection = make_selection(shape, rank_);
  const std::vector<int> widths = rail_widths();
  std::vector<std::uint16_t> x(static_cast<std::size_t>(shape.hidden));
  for (std::int64_t token = 0; token < shape.tokens; ++token) {
    fill_row_bf16(rank_, token, x);
    std::vector<std::vector<oracle::WeightedRow>> rows(static_cast<std::size_t>(shape.ranks));
    for (int k = 0; k < shape.topk; ++k) {
      const std::int64_t owner = selection[at(token, shape.topk, k)] / shape.local_experts();
      rows[at(owner, 1)].push_back({x, 1.0f});
    }
    const auto seen = std::span(sums).subspan(at(token, shape.hidden), x.size());
    const auto expected_with = [&](int width) { return oracle::combine_row(rank_, rows, shape.hidden, width); };
    const oracle::Combined expected = expected_with(0);
    // Sums of small whole numbers: only the roundings to BF16 count.
    const std::size_t wrong = first_wrong(seen, expected);
    if (wrong == x.size()) continue;
    const bool by_rails =
        std::ranges::any_of(widths, [&](int width) { return first_wrong(seen, expected_with(width)) == x.size(); });
    if (by_rails) continue;
    // With hooks, where owners get the rows as the experts left them.
    std::vector<std::vector<oracle::WeightedRow>> together(rows.size());
    together[at(rank_, 1)].assign(static_cast<std::size_t>(shape.topk), {x, 1.0f});
    if (first_wrong(seen, oracle::combine_row(rank_, together, shape.hidden)) == x.size()) continue;
    fail<Error>("check: combined token {} of rank {}, channel {}: {}, expected {}", token, rank_, wrong,
                oracle::bf16_value(seen[wrong]), oracle::bf16_value(expected.x[wrong]));
  }
}

void LowLatencyRank::destroy() {
  executor_.synchronize(stream_);
  handle_ = {};
  rows_.reset();
  buffer_.destroy();
}

}  // namespace deep_ep::tools
