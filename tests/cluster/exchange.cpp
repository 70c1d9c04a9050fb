#include "tests/cluster/exchange.hpp"

#include <algorithm>
#include <cmath>
#include <span>

namespace deep_ep::test {
namespace {

const oracle::DispatchInput& input_of(const Rank& rank, const Case& one) {
  return one.inputs[static_cast<std::size_t>(rank.rank())];
}

const oracle::Received& received_by(const Rank& rank, const Case& one) {
  return one.dispatched.received[static_cast<std::size_t>(rank.rank())];
}

/// The first `rows` rows of a tensor of at least that many.
template <class T>
std::vector<T> first_rows(std::vector<T> all, std::int64_t rows, std::int64_t width) {
  const auto wanted = static_cast<std::size_t>(rows * width);
  require(all.size() >= wanted, "fewer rows than the oracle has");
  all.resize(wanted);
  return all;
}

void require_shape(const TensorView& view, DType dtype, std::initializer_list<std::int64_t> shape, const char* name) {
  const TensorView wanted = TensorView::contiguous(nullptr, dtype, shape);
  const bool same = view.dtype == dtype && view.dims == wanted.dims && view.shape == wanted.shape;
  require(same && view.is_contiguous(),
          std::string(name) + ": expected " + wanted.describe() + ", got " + view.describe());
}

void check_handle(Rank& rank, const Case& one, const DispatchHandle& handle, std::int64_t rows) {
  const Shape& shape = one.shape;
  const auto& expected = received_by(rank, one);
  const std::int64_t ranks = shape.ranks();
  const std::int64_t tokens = input_of(rank, one).tokens;
  require(handle.num_recv_rows == rows, "handle.num_recv_rows: " + std::to_string(handle.num_recv_rows));
  const int width = shape.ranks() / shape.nodes();
  require_shape(handle.rank_prefix_matrix.view(), DType::int32, {ranks, width}, "rank_prefix_matrix");
  require_shape(handle.destination_row.view(), DType::int32, {tokens, ranks}, "destination_row");
  require_shape(handle.recv_src_idx.view(), DType::int32, {rows}, "recv_src_idx");
  require_same(ends_on_node(one, rank.rank()), rank.download<std::int32_t>(handle.rank_prefix_matrix.view()),
               "rank_prefix_matrix", width);
  require_same(numbers_of_tokens(one, rank.rank()), rank.download<std::int32_t>(handle.destination_row.view()),
               "destination_row", ranks);
  require_same(expected.src_idx, first_rows(rank.download<std::int32_t>(handle.recv_src_idx.view()), expected.rows, 1),
               "recv_src_idx");
}

void check_topk(Rank& rank, const Case& one, const DispatchResult& result, std::int64_t rows) {
  const Shape& shape = one.shape;
  const auto& expected = received_by(rank, one);
  require(result.recv_topk_idx && result.recv_topk_weights, "top-k results are missing");
  require_shape(result.recv_topk_idx->view(), shape.idx_dtype, {rows, shape.topk}, "recv_topk_idx");
  require_shape(result.recv_topk_weights->view(), DType::float32, {rows, shape.topk}, "recv_topk_weights");
  const auto indices = rank.download_indices(result.recv_topk_idx->view());
  require_same(expected.topk_idx, first_rows(indices, expected.rows, shape.topk), "recv_topk_idx", shape.topk);
  for (auto i = static_cast<std::size_t>(expected.rows * shape.topk); i < indices.size(); ++i) {
    require(indices[i] == -1, "recv_topk_idx: the tail must be -1, is " + std::to_string(indices[i]));
  }
  require_same(expected.topk_weights,
               first_rows(rank.download<float>(result.recv_topk_weights->view()), expected.rows, shape.topk),
               "recv_topk_weights", shape.topk);
}

/// Memory for one input of combine.
TensorView place(Rank& rank, Buffer& buffer, Returned& returned, bool heap, DType dtype, std::int64_t rows,
                 std::int64_t width) {
  if (!heap) {
    const auto bytes = static_cast<std::size_t>(rows * width) * size_of(dtype);
    return TensorView::contiguous(rank.allocate(bytes), dtype, {rows, width}, rank.executor()->device());
  }
  returned.in_heap.push_back(buffer.allocate_tensor(dtype, {rows, width}, rank.call().stream));
  return returned.in_heap.back().view();
}

/// A view of scales with the strides that the shape asks for.
TensorView upload_scales(Rank& rank, const oracle::DispatchInput& input, DType dtype, ScaleLayout layout) {
  const std::int64_t tokens = input.tokens;
  const std::int64_t scales = input.scales_per_row;
  TensorView view = TensorView::contiguous(nullptr, dtype, {tokens, scales}, rank.executor()->device());
  switch (layout) {
    case ScaleLayout::row_major:
      break;
    case ScaleLayout::column_major:
      view.strides = {1, tokens};
      break;
    case ScaleLayout::padded:
      view.strides = {scales + 3, 1};
      break;
    case ScaleLayout::every_third:
      view.strides = {3 * scales + 2, 3};
      break;
  }
  const std::int64_t reach = (tokens > 0 ? (tokens - 1) * view.stride(0) + (scales - 1) * view.stride(1) : 0) + 1;
  std::vector<std::uint32_t> memory(static_cast<std::size_t>(reach), 0xdeadbeefu);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t s = 0; s < scales; ++s) {
      memory[static_cast<std::size_t>(t * view.stride(0) + s * view.stride(1))] =
          input.scales[static_cast<std::size_t>(t * scales + s)];
    }
  }
  view.data = rank.upload(memory, dtype, {reach}).data;
  return view;
}

}  // namespace

Inputs upload_inputs(Rank& rank, const Case& one) {
  const Shape& shape = one.shape;
  const auto& input = input_of(rank, one);
  const auto& selection = one.selections[static_cast<std::size_t>(rank.rank())];
  Inputs result;
  result.topk_idx = rank.upload_indices(selection.idx, shape.idx_dtype, {input.tokens, shape.topk});
  DispatchArguments& arguments = result.dispatch;
  arguments.x = rank.upload(input.x, shape.dtype, {input.tokens, shape.hidden});
  if (shape.scales > 0) arguments.x_scales = upload_scales(rank, input, shape.scale_dtype, shape.scale_layout);
  arguments.num_tokens_per_expert = rank.upload(input.layout.tokens_per_expert, DType::int32, {shape.experts()});
  arguments.is_token_in_rank = rank.upload(input.layout.token_in_rank, DType::boolean, {input.tokens, shape.ranks()});
  if (shape.with_topk) {
    arguments.topk_idx = result.topk_idx;
    arguments.topk_weights = rank.upload(selection.weights, DType::float32, {input.tokens, shape.topk});
  }
  arguments.expert_alignment = shape.alignment;
  return result;
}

void check_layout(Rank& rank, const Case& one, const DispatchLayout& layout) {
  const Shape& shape = one.shape;
  const auto& selection = one.selections[static_cast<std::size_t>(rank.rank())];
  const auto expected = oracle::layout(selection, shape.ranks(), shape.experts());
  require_shape(layout.num_tokens_per_rank.view(), DType::int32, {shape.ranks()}, "num_tokens_per_rank");
  require_shape(layout.num_tokens_per_expert.view(), DType::int32, {shape.experts()}, "num_tokens_per_expert");
  require_shape(layout.is_token_in_rank.view(), DType::boolean, {selection.tokens, shape.ranks()}, "is_token_in_rank");
  require_same(expected.tokens_per_rank, rank.download<std::int32_t>(layout.num_tokens_per_rank.view()),
               "num_tokens_per_rank");
  require_same(expected.tokens_per_expert, rank.download<std::int32_t>(layout.num_tokens_per_expert.view()),
               "num_tokens_per_expert");
  require_same(expected.token_in_rank, rank.download<std::uint8_t>(layout.is_token_in_rank.view()), "is_token_in_rank",
               shape.ranks());
}

std::vector<std::int32_t> numbers_of_tokens(const Case& one, int rank) {
  const auto ranks = static_cast<std::size_t>(one.shape.ranks()), source = static_cast<std::size_t>(rank);
  std::vector<std::int32_t> numbers = one.dispatched.destination_row[source];
  for (std::size_t at = 0; source != 0 && at < numbers.size(); ++at) {
    if (numbers[at] >= 0) numbers[at] -= one.dispatched.rank_prefix_matrix[(source - 1) * ranks + at % ranks];
  }
  return numbers;
}

std::vector<std::int32_t> ends_on_node(const Case& one, int rank) {
  const int ranks = one.shape.ranks(), width = ranks / one.shape.nodes();
  std::vector<std::int32_t> ends;
  for (int source = 0; source < ranks; ++source) {
    const auto first = one.dispatched.rank_prefix_matrix.begin() + source * ranks + rank / width * width;
    ends.insert(ends.end(), first, first + width);
  }
  return ends;
}

void check_node_counts(Rank& rank, const Case& one, int nodes, const DispatchLayout& layout) {
  const auto& selection = one.selections[static_cast<std::size_t>(rank.rank())];
  const auto in_rank = oracle::layout(selection, one.shape.ranks(), one.shape.experts()).token_in_rank;
  const auto per_node = static_cast<std::size_t>(one.shape.ranks() / nodes);
  std::vector<std::int32_t> expected(static_cast<std::size_t>(nodes));
  for (std::size_t first = 0; first < in_rank.size(); first += per_node) {  // a token's ranks of one node
    const auto ranks = std::span(in_rank).subspan(first, per_node);
    expected[first / per_node % expected.size()] += std::ranges::count(ranks, 0) < std::ssize(ranks) ? 1 : 0;
  }
  require_shape(layout.num_tokens_per_node.view(), DType::int32, {nodes}, "num_tokens_per_node");
  require_same(expected, rank.download<std::int32_t>(layout.num_tokens_per_node.view()), "num_tokens_per_node");
}

void check_dispatch(Rank& rank, const Case& one, const DispatchResult& result, DispatchExpectations expected) {
  const Shape& shape = one.shape;
  const auto& wanted = received_by(rank, one);
  const std::int64_t rows = expected.num_worst_tokens > 0 ? expected.num_worst_tokens : wanted.rows;
  const auto row_bytes = static_cast<std::int64_t>(shape.row_bytes());
  require_shape(result.recv_x.view(), shape.dtype, {rows, shape.hidden}, "recv_x");
  check_handle(rank, one, result.handle, rows);
  require_same(wanted.x, first_rows(rank.download<std::byte>(result.recv_x.view()), wanted.rows, row_bytes), "recv_x",
               row_bytes);
  require(result.recv_x_scales.has_value() == (shape.scales > 0), "recv_x_scales: there, or not, unlike x_scales");
  if (shape.scales > 0) {
    require_shape(result.recv_x_scales->view(), shape.scale_dtype, {rows, shape.scales}, "recv_x_scales");
    const auto scales = rank.download<std::uint32_t>(result.recv_x_scales->view());
    require_same(wanted.scales, first_rows(scales, wanted.rows, shape.scales), "recv_x_scales", shape.scales);
  }
  if (shape.with_topk && !expected.cached) {
    check_topk(rank, one, result, rows);
  } else {
    require(!result.recv_topk_idx && !result.recv_topk_weights, "top-k results nobody asked for");
  }
  if (expected.cached || expected.num_worst_tokens > 0) {
    require(result.num_recv_tokens_per_expert.empty(), "num_recv_tokens_per_expert must be empty");
  } else {
    require_same(wanted.tokens_per_expert, result.num_recv_tokens_per_expert, "num_recv_tokens_per_expert");
  }
}

Returned upload_returned(Rank& rank, Buffer& buffer, const Case& one, const DispatchHandle& handle, bool heap) {
  const Shape& shape = one.shape;
  const auto& returned = one.returned[static_cast<std::size_t>(rank.rank())];
  const std::int64_t rows = handle.num_recv_rows;
  const std::int64_t tokens = input_of(rank, one).tokens;
  Returned result;
  result.combine.handle = &handle;
  const TensorView to_fill = place(rank, buffer, result, heap, DType::bfloat16, rows, shape.combine_hidden);
  result.combine.x = to_fill;
  // Rows after the real ones must not take part: NaN would show in every sum.
  std::vector<std::uint16_t> x = returned.x;
  x.resize(static_cast<std::size_t>(rows * shape.combine_hidden), 0x7fff);
  rank.write(to_fill, std::as_bytes(std::span<const std::uint16_t>(x)));
  if (shape.with_topk && shape.combine_weights) {
    const TensorView weights_to_fill = place(rank, buffer, result, heap, DType::float32, rows, shape.topk);
    result.combine.topk_weights = weights_to_fill;
    std::vector<float> weights = returned.topk_weights;
    weights.resize(static_cast<std::size_t>(rows * shape.topk), std::nanf(""));
    rank.write(weights_to_fill, std::as_bytes(std::span<const float>(weights)));
  }
  if (shape.bias_0) {
    result.combine.bias_0 = rank.upload(returned.bias_0, DType::bfloat16, {tokens, shape.combine_hidden});
  }
  if (shape.bias_1) {
    result.combine.bias_1 = rank.upload(returned.bias_1, DType::bfloat16, {tokens, shape.combine_hidden});
  }
  return result;
}

std::vector<Tensor> take_whole_heap(Rank& rank, Buffer& buffer) {
  std::vector<Tensor> taken;
  for (std::int64_t bytes = std::int64_t{1} << 40; bytes >= 128;) {  // in ever smaller pieces
    try {
      taken.push_back(buffer.allocate_tensor(DType::uint8, {bytes}, rank.call().stream));
    } catch (const OutOfMemory&) {
      bytes /= 2;
    }
  }
  return taken;
}

void check_combine(Rank& rank, const Case& one, const CombineResult& result) {
  const Shape& shape = one.shape;
  const auto& expected = one.combined[static_cast<std::size_t>(rank.rank())];
  const std::int64_t tokens = input_of(rank, one).tokens;
  require_shape(result.combined_x.view(), DType::bfloat16, {tokens, shape.combine_hidden}, "combined_x");
  const auto x = rank.download<std::uint16_t>(result.combined_x.view());
  // First against the sum in double precision: if the exact rule fails, this tells a wrong order from a wrong sum.
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double error = std::abs(static_cast<double>(oracle::bf16_value(x[i])) - expected.sum[i]);
    require(error <= expected.tolerance[i], "combined_x: element " + std::to_string(i) + " should be about " +
                                                std::to_string(expected.sum[i]) + ", is " +
                                                std::to_string(oracle::bf16_value(x[i])));
  }
  require_same(expected.x, x, "combined_x", shape.combine_hidden);
  const bool weights = shape.with_topk && shape.combine_weights;
  require(result.combined_topk_weights.has_value() == weights,
          "combined_topk_weights: there, or not, unlike the input");
  if (!weights) return;
  require_shape(result.combined_topk_weights->view(), DType::float32, {tokens, shape.topk}, "combined_topk_weights");
  require_same(expected.topk_weights, rank.download<float>(result.combined_topk_weights->view()),
               "combined_topk_weights", shape.topk);
}

namespace {

void run_steps(Rank& rank, Buffer& buffer, const Case& one, const RoundOptions& options) {
  Inputs inputs = upload_inputs(rank, one);
  DispatchLayout layout;
  if (options.use_layout_call) {
    layout = buffer.get_dispatch_layout(inputs.topk_idx, one.shape.experts(), rank.call());
    check_layout(rank, one, layout);
    inputs.dispatch.use(layout);
  }
  inputs.dispatch.num_sms = options.num_sms;
  inputs.dispatch.num_worst_tokens = options.num_worst_tokens;
  const DispatchResult dispatched = buffer.dispatch(inputs.dispatch, rank.call());
  check_dispatch(rank, one, dispatched, {.cached = false, .num_worst_tokens = options.num_worst_tokens});
  Returned returned = upload_returned(rank, buffer, one, dispatched.handle, options.returned_in_heap);
  returned.combine.num_sms = options.num_sms;
  check_combine(rank, one, buffer.combine(returned.combine, rank.call()));
}

}  // namespace

void run_round(Rank& rank, Buffer& buffer, const Case& one, const RoundOptions& options) {
  try {
    run_steps(rank, buffer, one, options);
  } catch (const std::exception& error) {
    std::string text = std::string(error.what()) + "\n    in the round " + one.shape.describe();
    try {
      buffer.check();
    } catch (const std::exception& cause) {  // wrong data may be the result of a fault that nobody has raised yet
      text += std::string("\n    after ") + cause.what();
    }
    throw CheckFailure(text);
  }
}

}  // namespace deep_ep::test
