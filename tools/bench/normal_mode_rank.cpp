#include "tools/bench/normal_mode_rank.hpp"

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
      inputs_(*executor, shape, rank_, stream_) {
  handle_ = dispatch(false, Config{}).handle;
}

DispatchLayout NormalModeBench::layout() {
  return buffer_.get_dispatch_layout(inputs_.selection.view(), shape_.experts, call_);
}

CachedDispatchResult NormalModeBench::cached_dispatch(bool as_8bit, const Config& config) {
  CachedDispatchArguments arguments;
  inputs_.set_rows(arguments, as_8bit);
  arguments.config = config;
  arguments.handle = &handle_;
  return buffer_.cached_dispatch(arguments, call_);
}

DispatchResult NormalModeBench::dispatch(bool as_8bit, const Config& config) {
  const DispatchLayout counts = layout();
  DispatchArguments arguments;
  inputs_.set_rows(arguments, as_8bit);
  arguments.config = config;
  arguments.use(counts);
  arguments.topk_idx = inputs_.selection.view();
  arguments.topk_weights = inputs_.weights.view();
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

}  // namespace deep_ep::tools
