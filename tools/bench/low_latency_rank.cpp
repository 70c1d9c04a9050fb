#include "tools/bench/low_latency_rank.hpp"

#include <span>
#include <vector>

#include "tools/bench/low_latency.hpp"

namespace deep_ep::tools {
namespace {

BufferOptions with_sizes(BufferOptions options, const WorkloadShape& shape) {
  options.heap_bytes = std::size_t{64} << 20;
  options.low_latency.bytes =
      Buffer::low_latency_bytes_hint(static_cast<int>(shape.tokens), shape.hidden, shape.ranks, shape.experts);
  return options;
}

}  // namespace

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

LowLatencyRank::LowLatencyRank(const RankTask& task, const BufferOptions& base)
    : shape_(task.shape),
      rank_(task.rank()),
      options_(with_sizes(base, shape_)),
      executor_(*task.executor),
      stream_(executor_),
      buffer_(task.bootstrap, task.executor, options_),
      x_(executor_, DType::bfloat16, {shape_.tokens, shape_.hidden}),
      kept_x_(executor_, DType::bfloat16, {shape_.tokens, shape_.hidden}),
      selection_(executor_, DType::int64, {shape_.tokens, shape_.topk}),
      weights_(executor_, DType::float32, {shape_.tokens, shape_.topk}),
      global_scale_(executor_, DType::float32, {1}) {
  const auto hidden = static_cast<std::size_t>(shape_.hidden);
  std::vector<std::uint16_t> x(static_cast<std::size_t>(shape_.tokens) * hidden);
  for (std::int64_t token = 0; token < shape_.tokens; ++token) {
    fill_row_bf16(rank_, token, std::span(x).subspan(static_cast<std::size_t>(token) * hidden, hidden));
  }
  x_.upload(x.data(), stream_);
  kept_x_.upload(x.data(), stream_);
  selection_.upload(make_selection(shape_, rank_).data(), stream_);
  global_scale_.upload(&oracle::kGlobalScale, stream_);
  weights_.upload(std::vector<float>(weights_.view().bytes() / sizeof(float), 1.0f).data(), stream_);
}

void LowLatencyRank::count_arrivals() {
  constexpr std::int64_t kRows = 64;
  const std::int64_t words = (shape_.ranks * shape_.tokens + kRows - 1) / kRows;
  arrivals_.emplace(executor_, DType::int64, std::initializer_list<std::int64_t>{shape_.local_experts(), words});
  executor_.fill(arrivals_->view().data, 0, arrivals_->view().bytes(), stream_);
  executor_.synchronize(stream_);  // before a call that is refused gives the memory back
}

LowLatencyDispatchResult LowLatencyRank::dispatch(oracle::RowFormat format, bool hook) {
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

LowLatencyCombineResult LowLatencyRank::combine(LowLatencyCombine kind, bool hook) {
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

void LowLatencyRank::destroy() {
  executor_.synchronize(stream_);
  handle_ = {};
  rows_.reset();
  buffer_.destroy();
}

BufferOptions LowLatencyBenchOptions::buffer(int ranks) const {
  BufferOptions options;
  options.ranks_per_node = nodes == 0 ? 0 : ranks / nodes;
  options.low_latency.allow_nvlink = nvlink;
  options.low_latency.masking = masking;
  options.low_latency.rails = rails == "always"  ? LowLatencyRails::always
                              : rails == "never" ? LowLatencyRails::never
                                                 : LowLatencyRails::automatic;
  return options;
}

std::unique_ptr<DeviceTensor> make_filler(Executor& executor, int calls) {
  if (executor.device().kind != Device::Kind::cuda) return nullptr;
  return std::make_unique<DeviceTensor>(executor, DType::uint8,
                                        std::initializer_list<std::int64_t>{calls * (std::int64_t{256} << 20)});
}

}  // namespace deep_ep::tools
