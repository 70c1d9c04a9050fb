#include "tools/bench/low_latency_rank.hpp"

#include <span>
#include <vector>

namespace deep_ep::tools {

const char* name_of(LowLatencyCombine kind) {
  switch (kind) {
    case LowLatencyCombine::plain:
      return "plain";
    case LowLatencyCombine::zero_copy:
      return "zero copy";
    case LowLatencyCombine::fp8:
      return "FP8";
  }
  return "?";
}

LowLatencyBench::LowLatencyBench(const WorkloadShape& shape, const std::shared_ptr<Bootstrap>& bootstrap,
                                 const std::shared_ptr<Executor>& executor, const LowLatencyReach& reach)
    : shape_(shape),
      executor_(*executor),
      stream_(*executor),
      buffer_(bootstrap, executor, buffer_options(shape, reach)),
      x_(*executor, DType::bfloat16, {shape.tokens, shape.hidden}),
      kept_x_(*executor, DType::bfloat16, {shape.tokens, shape.hidden}),
      selection_(*executor, DType::int64, {shape.tokens, shape.topk}),
      weights_(*executor, DType::float32, {shape.tokens, shape.topk}),
      global_scale_(*executor, DType::float32, {1}) {
  fill_inputs(bootstrap->rank());
}

void LowLatencyBench::count_arrivals() {
  constexpr std::int64_t kRows = 64;
  const std::int64_t words = (shape_.ranks * shape_.tokens + kRows - 1) / kRows;
  arrivals_.emplace(executor_, DType::int64, std::initializer_list<std::int64_t>{shape_.local_experts(), words});
  executor_.fill(arrivals_->view().data, 0, arrivals_->view().bytes(), stream_);
}

LowLatencyDispatchResult LowLatencyBench::dispatch(oracle::RowFormat format, bool hook) {
  LowLatencyDispatchArguments arguments;
  arguments.x = x_.view();
  arguments.topk_idx = selection_.view();
  arguments.max_tokens = static_cast<int>(shape_.tokens);
  arguments.num_experts = shape_.experts;
  arguments.use_nvfp4 = format == oracle::RowFormat::nvfp4;
  arguments.use_fp8 = format != oracle::RowFormat::bf16 && !arguments.use_nvfp4;
  arguments.scale_per_token = format == oracle::RowFormat::fp8_token;
  if (arguments.use_nvfp4) arguments.x_global_scale = global_scale_.view();
  if (arrivals_) {
    arguments.arrival_counters = arrivals_->view();
    arguments.arrival_rows = 64;
  }
  arguments.return_recv_hook = hook;
  return buffer_.low_latency_dispatch(arguments, {.stream = stream_});
}

LowLatencyCombineResult LowLatencyBench::combine(LowLatencyCombine kind, bool hook) {
  LowLatencyCombineArguments arguments;
  arguments.x =
      kind == LowLatencyCombine::zero_copy ? buffer_.low_latency_combine_buffer(handle_) : rows_.value().view();
  arguments.topk_idx = selection_.view();
  arguments.topk_weights = weights_.view();
  arguments.handle = &handle_;
  arguments.use_fp8 = kind == LowLatencyCombine::fp8;
  arguments.return_recv_hook = hook;
  return buffer_.low_latency_combine(arguments, {.stream = stream_});
}

void LowLatencyBench::receive_for_combine() {
  const LowLatencyDispatchResult received = dispatch(false);
  handle_ = received.handle;
  const TensorView& rows = received.recv_x.view();
  if (!rows_) {  // it keeps its place, which graphs have recorded
    rows_.emplace(executor_, rows.dtype, std::initializer_list<std::int64_t>{rows.size(0), rows.size(1), rows.size(2)});
  }
  executor_.copy(rows_->view().data, rows.data, rows.bytes(), stream_);
  executor_.copy(buffer_.low_latency_combine_buffer(handle_).data, rows.data, rows.bytes(), stream_);
  executor_.synchronize(stream_);
}

void LowLatencyBench::spoil() {
  constexpr int kOther = 0x3c;  // 0x3c3c is a bfloat16 that no workload has
  executor_.fill(x_.view().data, kOther, x_.view().bytes(), stream_);
  if (!rows_) return;
  executor_.fill(rows_->view().data, kOther, rows_->view().bytes(), stream_);
  const TensorView zero_copy = buffer_.low_latency_combine_buffer(handle_);
  executor_.fill(zero_copy.data, kOther, zero_copy.bytes(), stream_);
}

void LowLatencyBench::restore() {
  executor_.copy(x_.view().data, kept_x_.view().data, x_.view().bytes(), stream_);
  if (rows_) receive_for_combine();
}

void LowLatencyBench::destroy() {
  executor_.synchronize(stream_);
  handle_ = {};
  rows_.reset();
  buffer_.destroy();
}

BufferOptions LowLatencyBench::buffer_options(const WorkloadShape& shape, const LowLatencyReach& reach) {
  BufferOptions options;
  options.heap_bytes = std::size_t{64} << 20;
  options.low_latency.allow_nvlink = reach.nvlink;
  options.ranks_per_node = reach.ranks_per_node;
  options.low_latency.rails = reach.rails;
  options.low_latency.bytes =
      Buffer::low_latency_bytes_hint(static_cast<int>(shape.tokens), shape.hidden, shape.ranks, shape.experts);
  return options;
}

void LowLatencyBench::fill_inputs(int rank) {
  const auto tokens = static_cast<std::size_t>(shape_.tokens);
  const auto hidden = static_cast<std::size_t>(shape_.hidden);
  std::vector<std::uint16_t> x(tokens * hidden);
  for (std::size_t token = 0; token < tokens; ++token) {
    fill_row_bf16(rank, static_cast<std::int64_t>(token), std::span(x).subspan(token * hidden, hidden));
  }
  x_.upload(x.data(), stream_);
  kept_x_.upload(x.data(), stream_);
  selection_.upload(make_selection(shape_, rank).data(), stream_);
  global_scale_.upload(&oracle::kGlobalScale, stream_);
  const std::size_t selections = tokens * static_cast<std::size_t>(shape_.topk);
  weights_.upload(std::vector<float>(selections, 1.0f).data(), stream_);
}

}  // namespace deep_ep::tools
