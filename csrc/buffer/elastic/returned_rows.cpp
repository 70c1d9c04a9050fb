// Combine of the second interface as a dispatch of the rows back to their tokens, and sums of what came: between nodes,
// and where the biases are read later than the call.
#include <algorithm>

#include "csrc/buffer/elastic/elastic.hpp"
#include "csrc/buffer/row_launch.hpp"
#include "csrc/executor/kernel_table.hpp"

namespace deep_ep {
namespace {

void address_rows(const Backend& executor, const AddressRowsParams& params, StreamHandle stream) {
  executor.kernels().address_rows(
      params, shape_for_warps(params.metadata.num_rows, executor.policy(), kernels::address_rows::kMaxThreads), stream);
}

void find_returned_rows(const Backend& executor, const SumRowsParams& params, StreamHandle stream) {
  if (params.returned.num_tokens == 0) return;
  executor.kernels().find_returned_rows(
      params, shape_for_warps((params.num_rows + 31) / 32, executor.policy(), kernels::find_returned_rows::kMaxThreads),
      stream);
}

void sum_rows(const Backend& executor, const SumRowsParams& params, StreamHandle stream) {
  const bool returned = params.returned.beside != nullptr;
  const std::int64_t sums = returned ? params.returned.num_tokens : params.metadata.num_rows;
  if (sums == 0) return;
  executor.kernels().sum_rows(
      params,
      shape_for_warps(pieces_of_sums(sums, params.row_bytes), executor.policy(), kernels::sum_rows::kMaxThreads),
      stream);
}

SumRowsParams returning_params(const ElasticReturn& back, Runtime& runtime) {
  const ElasticCombineArguments& arguments = back.arguments;
  const std::int64_t width = back.ends.size(1);
  SumRowsParams params{};
  params.rows = back.rows.as<std::byte>();
  params.num_rows = back.rows.size(0);
  set_biases(params, arguments);
  params.row_bytes = static_cast<std::uint32_t>(back.rows.size(1) * 2);
  params.returned = {
      .beside = back.beside.as<std::int32_t>(),
      .beside_stride = back.beside.size(1),
      .num_valid = back.ends.as<std::int32_t>() + (runtime.num_ranks() - 1) * width + runtime.rank() % width,
      .topk_idx = indices_of(arguments.topk_idx),
      .num_tokens = arguments.topk_idx.size(0),
      .num_topk = static_cast<int>(arguments.topk_idx.size(1)),
      .num_experts = arguments.num_experts / runtime.num_ranks(),
      .each_selection = arguments.each_selection,
      .weights = nullptr,
      .row_of = back.row_of.as<std::int32_t>()};
  return params;
}

void hand_out_return(const ElasticReturn& back, const CallScope& scope) {
  for (const Tensor* tensor : {&back.rows, &back.beside, &back.ends, &back.row_of}) scope.hand_out(*tensor);
}

}  // namespace

ElasticReturn NormalMode::send_back(const ElasticCombineArguments& arguments, std::vector<Tensor>& kept,
                                    CallScope& scope) {
  const Device device = runtime_.device();
  const RowMetadata metadata = row_metadata(arguments.metadata, arguments.source_ends, device);
  DispatchArguments back;
  back.x = arguments.x;
  if (arguments.expanded && !arguments.each_selection) {
    const Tensor sums = scope.pool_tensor(unplaced(device, DType::bfloat16, {metadata.num_rows, arguments.x.size(1)}));
    SumRowsParams params{};
    params.rows = arguments.x.as<std::byte>();
    params.num_rows = arguments.x.size(0);
    params.metadata = metadata;
    params.sums = sums.as<std::byte>();
    params.row_bytes = static_cast<std::uint32_t>(arguments.x.size(1) * 2);
    sum_rows(*runtime_.executor(), params, scope.stream());
    back.x = sums.view();
    kept.push_back(sums);
  }

  const std::int64_t sent = back.x.size(0);
  check_token_count("number of rows in x", sent, runtime_.num_ranks());
  const int ranks = runtime_.num_ranks(), columns = arguments.topk_weights ? 1 + metadata.num_topk : 1;
  Tensor counts, is_sent, beside;
  WantedTensors tables(device);
  tables.add(counts, DType::int32, {ranks});
  tables.add(is_sent, DType::boolean, {sent, ranks});
  tables.add(beside, DType::int32, {sent, columns});
  tables.place_in_pool(scope);
  kept.push_back(counts);  // all of one piece
  const auto before = static_cast<std::size_t>(is_sent.as<std::byte>() - counts.as<std::byte>());
  runtime_.executor()->fill(counts.data(), 0, before + is_sent.view().bytes(), scope.stream());
  AddressRowsParams params{};
  params.metadata = metadata;
  params.num_ranks = ranks;
  params.max_tokens = arguments.max_tokens;
  params.each_selection = arguments.each_selection;
  params.num_sent = sent;
  if (arguments.topk_weights) {
    params.weights = arguments.topk_weights->as<float>();
    params.weights_of_slots = arguments.expanded;
    params.num_weights = arguments.topk_weights->size(0);
  }
  params.is_token_in_rank = is_sent.as<std::uint8_t>();
  params.beside = beside.as<std::int32_t>();
  params.columns = columns;
  address_rows(*runtime_.executor(), params, scope.stream());

  back.x_scales = beside.view();
  back.num_tokens_per_expert = counts.view();
  back.is_token_in_rank = is_sent.view();
  back.num_worst_tokens = std::int64_t{arguments.max_tokens} *
                          (arguments.each_selection ? metadata.num_topk : std::min(metadata.num_topk, ranks));
  back.config = arguments.config;
  const DispatchResult came = dispatch(back, scope);
  for (const Tensor* tensor : {&came.handle.recv_src_idx, &came.handle.relay_rows}) kept.push_back(*tensor);
  ElasticReturn returned{.arguments = arguments,
                         .rows = came.recv_x,
                         .beside = *came.recv_x_scales,
                         .ends = came.handle.rank_prefix_matrix};
  const ConstTensorView& topk_idx = arguments.topk_idx;
  returned.row_of = scope.pool_tensor(unplaced(device, DType::int32, {topk_idx.size(0), topk_idx.size(1)}));
  find_returned_rows(*runtime_.executor(), returning_params(returned, runtime_), scope.stream());
  return returned;
}

CombineResult sum_returned(const ElasticReturn& back, Runtime& runtime, const CallScope& scope) {
  const ConstTensorView& topk_idx = back.arguments.topk_idx;
  const bool weighted = back.arguments.topk_weights.has_value();
  CombineResult result = make_sums(back.rows.view(), topk_idx.size(0), weighted ? topk_idx.size(1) : 0, scope);
  SumRowsParams params = returning_params(back, runtime);
  params.sums = result.combined_x.as<std::byte>();
  params.returned.weights = memory_of<std::int32_t>(result.combined_topk_weights);
  sum_rows(*runtime.executor(), params, scope.stream());
  return result;
}

ElasticReturn NormalMode::begin_combine_elastic(const ElasticCombineArguments& arguments, const CallOptions& call) {
  check_elastic_combine(arguments, runtime_);
  CallScope scope = runtime_.begin(call);
  std::vector<Tensor> kept;
  ElasticReturn back = scope.inside([&] { return send_back(arguments, kept, scope); });
  hand_out_return(back, scope);
  back.event = scope.finish();
  return back;
}

CombineResult NormalMode::end_combine_elastic(const ElasticReturn& back, const CallOptions& call) {
  if (!back.rows.defined()) throw InvalidArgument("back is empty, allowed: what begin_combine_elastic returned");
  CallScope scope = runtime_.begin(call);
  CombineResult result = sum_returned(back, runtime_, scope);
  hand_out_return(back, scope);
  result.event = scope.finish();
  return result;
}

}  // namespace deep_ep
