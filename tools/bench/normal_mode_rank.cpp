#include "bench_support/normal_mode_rank.hpp"

namespace deep_ep::tools {

NormalModeBench::NormalModeBench(const WorkloadShape& shape, const Routes& routes,
                                 const std::shared_ptr<Bootstrap>& bootstrap, const std::shared_ptr<Executor>& executor)
    : shape_(shape),
      routes_(routes),
      executor_(*executor),
      rank_(bootstrap->rank()),
      stream_(*executor),
      call_{stream_, {}, false},
      buffer_(bootstrap, executor, buffer_options(shape)),
      x_bf16_(*executor, DType::bfloat16, {shape.tokens, shape.hidden}),
      x_8bit_(*executor, DType::float8_e4m3, {shape.tokens, shape.hidden}),
      scales_(*executor, DType::float32, {shape.tokens, shape.scales()}),
      selection_(*executor, DType::int64, {shape.tokens, shape.topk}),
      weights_(*executor, DType::float32, {shape.tokens, shape.topk}) {
  fill_inputs();
  handle_ = dispatch(false, Config{}).handle;
}

DispatchLayout NormalModeBench::layout() {
  return buffer_.get_dispatch_layout(selection_.view(), shape_.experts, call_);
}

template <class Arguments>
void NormalModeBench::set_rows(Arguments& arguments, bool as_8bit, const Config& config) const {
  arguments.x = as_8bit ? x_8bit_.view() : x_bf16_.view();
  if (as_8bit) arguments.x_scales = scales_.view();
  arguments.config = config;
}

CachedDispatchResult NormalModeBench::cached_dispatch(bool as_8bit, const Config& config) {
  CachedDispatchArguments arguments;
  set_rows(arguments, as_8bit, config);
  arguments.handle = &handle_;
  return buffer_.cached_dispatch(arguments, call_);
}

DispatchResult NormalModeBench::dispatch(bool as_8bit, const Config& config) {
  const DispatchLayout counts = layout();
  DispatchArguments arguments;
  set_rows(arguments, as_8bit, config);
  arguments.use(counts);
  arguments.topk_idx = selection_.view();
  arguments.topk_weights = weights_.view();
  return buffer_.dispatch(arguments, call_);
}

CombineResult NormalModeBench::combine(CombineMode mode, const Config& config) {
  CombineArguments arguments;
  arguments.x = mode == CombineMode::push ? ordinary_rows_->view() : received_.recv_x.view();
  arguments.handle = &handle_;
  arguments.mode = mode;
  arguments.config = config;
  return buffer_.combine(arguments, call_);
}

void NormalModeBench::receive_for_combine(CombineMode mode) {
  received_ = cached_dispatch(false, Config{});
  if (mode != CombineMode::push) return;
  const TensorView rows = received_.recv_x.view();
  ordinary_rows_.emplace(executor_, rows.dtype, std::initializer_list<std::int64_t>{rows.size(0), rows.size(1)});
  if (rows.bytes() > 0) executor_.copy(ordinary_rows_->view().data, rows.data, rows.bytes(), stream_);
}

void NormalModeBench::release_rows() {
  executor_.synchronize(stream_);
  received_ = {};
  ordinary_rows_.reset();
}

std::vector<std::int64_t> NormalModeBench::bytes_to_peers(std::int64_t row_bytes) const {
  std::vector<std::int64_t> bytes;
  for (int peer = 0; peer < shape_.ranks; ++peer) bytes.push_back(routes_.rows(rank_, peer) * row_bytes);
  return bytes;
}

std::vector<std::int64_t> NormalModeBench::bytes_from_peers(std::int64_t row_bytes) const {
  std::vector<std::int64_t> bytes;
  for (int peer = 0; peer < shape_.ranks; ++peer) bytes.push_back(routes_.rows(peer, rank_) * row_bytes);
  return bytes;
}

void NormalModeBench::destroy() {
  release_rows();
  handle_ = {};
  buffer_.destroy();
}

BufferOptions NormalModeBench::buffer_options(const WorkloadShape& shape) {
  BufferOptions options;
  // The rows of one round may still be held while the next one asks for its own.
  options.heap_bytes = 3 * Buffer::heap_bytes_hint(shape.ranks, shape.tokens, shape.row_bytes_bf16(), shape.topk);
  options.window_bytes = shape.window_bytes;
  if (shape.nodes > 1) options.ranks_per_node = shape.ranks_per_node();
  return options;
}

void NormalModeBench::fill_inputs() {
  const auto tokens = static_cast<std::size_t>(shape_.tokens);
  const auto hidden = static_cast<std::size_t>(shape_.hidden);
  const auto blocks = static_cast<std::size_t>(shape_.scales());
  std::vector<std::uint16_t> bf16(tokens * hidden);
  std::vector<std::uint8_t> bits8(tokens * hidden);
  std::vector<float> scales(tokens * blocks);
  for (std::size_t token = 0; token < tokens; ++token) {
    const auto at = static_cast<std::int64_t>(token);
    fill_row_bf16(rank_, at, std::span(bf16).subspan(token * hidden, hidden));
    fill_row_8bit(rank_, at, std::span(bits8).subspan(token * hidden, hidden));
    fill_scales(rank_, at, std::span(scales).subspan(token * blocks, blocks));
  }
  x_bf16_.upload(bf16.data(), stream_);
  x_8bit_.upload(bits8.data(), stream_);
  scales_.upload(scales.data(), stream_);
  selection_.upload(make_selection(shape_, rank_).data(), stream_);
  const auto topk = static_cast<std::size_t>(shape_.topk);
  const std::vector<float> weights(tokens * topk, 1.0f / static_cast<float>(shape_.topk));
  weights_.upload(weights.data(), stream_);
}

}  // namespace deep_ep::tools
