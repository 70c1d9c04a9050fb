#include "tools/bench/low_latency_rank.hpp"

#include <cstdint>
#include <vector>

#include "csrc/buffer/options.hpp"
#include "csrc/support/format.hpp"
#include "tools/common/check_rows.hpp"

namespace deep_ep::tools {
namespace {

BufferOptions with_sizes(BufferOptions options, const WorkloadShape& shape) {
  options.heap_bytes = std::size_t{64} << 20;
  options.low_latency.bytes =
      Buffer::low_latency_bytes_hint(static_cast<int>(shape.tokens), shape.hidden, shape.ranks, shape.experts);
  return options;
}

}  // namespace

LowLatencyRank::LowLatencyRank(const RankTask& task, const BufferOptions& base, bool weights)
    : shape_(task.shape),
      rank_(task.rank()),
      gives_weights_(weights),
      executor_(*task.executor),
      stream_(executor_),
      buffer_(task.bootstrap, task.executor, with_sizes(base, shape_)),
      x_(executor_, DType::bfloat16, {shape_.tokens, shape_.hidden}),
      selection_(executor_, DType::int64, {shape_.tokens, shape_.topk}),
      weights_(executor_, DType::float32, {shape_.tokens, shape_.topk}),
      global_scale_(executor_, DType::float32, {1}) {
  x_.upload(filled_rows<std::uint16_t>(shape_, rank_, shape_.hidden, fill_row_bf16).data(), stream_);
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

LowLatencyCombineResult LowLatencyRank::combine(bool hook) {
  LowLatencyCombineArguments arguments;
  arguments.x = rows_.value().view();
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
  executor_.synchronize(stream_);
}

void LowLatencyRank::spoil() {
  constexpr int kOther = 0x3c;  // 0x3c3c is a bfloat16 that no workload has
  executor_.fill(x_.view().data, kOther, x_.view().bytes(), stream_);
  if (!rows_) return;
  executor_.fill(rows_->view().data, kOther, rows_->view().bytes(), stream_);
}

void LowLatencyRank::restore() {
  x_.upload(filled_rows<std::uint16_t>(shape_, rank_, shape_.hidden, fill_row_bf16).data(), stream_);
  if (rows_) receive_for_combine();
}

void LowLatencyRank::check_dispatched(oracle::RowFormat format, const LowLatencyDispatchResult& result) {
  const auto fetch = [&]<class T>(const Tensor& tensor, T) { return to_host<T>(executor_, tensor.view(), stream_); };
  oracle::LowLatencyOutput seen{
      .routes = {fetch(result.recv_count, std::int32_t{}), fetch(result.handle.layout_range, std::int64_t{}),
                 fetch(result.handle.src_info, std::int32_t{})},
      .x = fetch(result.recv_x, std::byte{}),
      .scales = {}};
  if (result.recv_x_scales) seen.scales = fetch(*result.recv_x_scales, std::uint32_t{});
  std::vector<oracle::Selection> selections;
  for (int source = 0; source < shape_.ranks; ++source) {
    selections.push_back({shape_.tokens, shape_.topk, make_selection(shape_, source), {}});
  }
  const auto routes = oracle::low_latency_dispatch({shape_.ranks, shape_.experts, shape_.tokens}, selections);
  std::vector<std::uint16_t> row(static_cast<std::size_t>(shape_.hidden));
  const auto sent = [&](int source, std::int64_t token) {
    fill_row_bf16(source, token, row);
    return oracle::Row(row);
  };
  const std::string wrong =
      oracle::difference(routes.shape, format, routes.received[static_cast<std::size_t>(rank_)], seen, sent);
  if (!wrong.empty()) fail<Error>("check: rank {}: {}", rank_, wrong);
}

void LowLatencyRank::check_combined(const LowLatencyCombineResult& result) {
  const std::vector<std::int64_t> selection = make_selection(shape_, rank_);
  std::vector<std::uint16_t> row(static_cast<std::size_t>(shape_.hidden));
  const LowLatencySums sums = buffer_.options().low_latency.sums;
  const int nodes = buffer_.num_nodes();
  const oracle::LowLatencyCombineOptions how{
      .ranks_per_node = nodes > 1 && shape_.ranks % nodes == 0 ? shape_.ranks / nodes : 0,
      .sum_bits = 16 + rest_bits_of(sums)};
  const auto sum_of = [&](std::int64_t token) {
    fill_row_bf16(rank_, token, row);
    std::vector<std::vector<oracle::WeightedRow>> rows(static_cast<std::size_t>(shape_.ranks));
    for (int k = 0; k < shape_.topk; ++k) {
      const std::int64_t expert = selection[static_cast<std::size_t>(token * shape_.topk + k)];
      rows[static_cast<std::size_t>(expert / shape_.local_experts())].push_back({row, 1.0f});
    }
    return oracle::low_latency_sum(rows, shape_.hidden, how);
  };
  check_sums(rank_, shape_.tokens, shape_.hidden, to_host<std::uint16_t>(executor_, result.combined_x.view(), stream_),
             /*exact=*/true, sum_of);
}

void LowLatencyRank::destroy() {
  executor_.synchronize(stream_);
  handle_ = {};
  rows_.reset();
  buffer_.destroy();
}

}  // namespace deep_ep::tools
