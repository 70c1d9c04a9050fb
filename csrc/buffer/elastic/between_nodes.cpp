// Dispatch of the second interface between nodes: a dispatch of normal mode brings the rows, and kernels number them
// and take them to the results.
#include <algorithm>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/elastic/elastic.hpp"
#include "csrc/buffer/internode/internode.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep {
namespace {

template <class T>
const T* memory_of(const std::optional<Tensor>& tensor) {
  return tensor ? tensor->as<T>() : nullptr;
}

TopkIndices indices_of(const TensorSpec& spec, const void* data) { return {data, spec.dtype == DType::int64}; }

}  // namespace

LaunchShape plan_numbering(NumberRowsParams& params, std::int64_t rows, const LaunchPolicy& policy, bool on_gpu) {
  NumberingParams& numbers = params.numbers;
  constexpr int kMostWarps = kernels::number_selections::kMaxThreads / 32, kMostBlocks = 128;
  numbers.warps = on_gpu ? kMostWarps : std::min(policy.warps_per_block, kMostWarps);
  const std::int64_t selections = std::max(rows, params.num_tokens) * numbers.metadata.num_topk;
  const std::size_t bytes =
      fit_numbering(numbers, false, selections, std::min(policy.multiprocessors, kMostBlocks), policy.max_shared_bytes);
  if (bytes > policy.max_shared_bytes) {
    fail<InvalidArgument>("num_local_experts is {}, allowed: as many as fit {} bytes of shared memory, {} each",
                          numbers.num_experts, policy.max_shared_bytes, 4 * sizeof(std::int32_t));
  }
  return {numbers.blocks, numbers.warps * 32, bytes};
}

ElasticDispatchResult Internode::dispatch_elastic(const ElasticDispatchArguments& arguments, const CallOptions& call) {
  check_elastic_dispatch(arguments, runtime_);
  if (arguments.handle != nullptr) return dispatch_elastic_again(arguments, call);
  runtime_.faults().raise();
  const int ranks = runtime_.num_ranks();
  const auto topk = static_cast<int>(arguments.topk_idx.size(1));
  DispatchArguments sent;
  sent.x = arguments.x;
  sent.x_scales = arguments.x_scales;
  sent.topk_idx = arguments.topk_idx;
  sent.topk_weights = arguments.topk_weights;
  sent.expert_alignment = arguments.expert_alignment;
  sent.num_worst_tokens = arguments.exact ? 0 : std::int64_t{ranks} * arguments.max_tokens;
  sent.config = arguments.config;

  CallScope scope(runtime_.calls(), call);
  DispatchLayout layout;
  const DispatchResult came = scope.inside([&] {
    layout = count(arguments.topk_idx, arguments.num_experts, scope);
    sent.use(layout);
    return dispatch(sent, scope);
  });
  const std::int64_t received = came.handle.num_recv_rows;

  NumberRowsParams numbers{};
  numbers.wait = runtime_.faults().wait_context();
  numbers.numbers = numbering_params(arguments, runtime_);
  numbers.recv_topk_idx = indices_of(arguments.topk_idx, came.recv_topk_idx->data());
  numbers.source = came.handle.recv_src_idx.as<std::int32_t>();
  numbers.ends = came.handle.rank_prefix_matrix.as<std::int32_t>() + grid_.index();
  numbers.ends_stride = grid_.width;
  numbers.topk_idx = indices_of(arguments.topk_idx, arguments.topk_idx.data);
  numbers.num_tokens = arguments.x.size(0);
  numbers.destination_row = came.handle.destination_row.as<std::int32_t>();
  const LaunchShape numbering = plan_numbering(numbers, received, runtime_.policy(), runtime_.on_gpu());
  ElasticDispatchHandle handle =
      make_elastic_tables(arguments, received, false, numbers.numbers, *common_.state, scope);
  handle.num_expanded = expanded_rows(arguments, ranks, came.num_recv_tokens_per_expert);
  handle.route = came.handle;
  handle.route.recv_src_idx = {};
  runtime_.executor()->kernels().number_selections(numbers, numbering, scope.stream());

  ElasticDispatchResult result = make_elastic_results(arguments, handle, received, scope);
  const SentRows rows = sent_rows(arguments.x, arguments.x_scales);
  SpreadRowsParams moving = spreading_params({.rows = came.recv_x.as<std::byte>(),
                                              .row_bytes = rows.rows.row_bytes,
                                              .scales = memory_of<std::uint32_t>(came.recv_x_scales),
                                              .weights = memory_of<std::uint32_t>(came.recv_topk_weights),
                                              .scale_stride = rows.rows.num_scales,
                                              .weight_stride = topk},
                                             result, arguments, handle, numbers.wait.abort);
  const LaunchShape shape = plan_spreading(moving, runtime_.policy());
  runtime_.executor()->kernels().spread_rows(moving, shape, scope.stream());
  hand_out(handle.route, scope);
  result.num_recv_tokens_per_expert = came.num_recv_tokens_per_expert;
  result.handle = std::move(handle);
  result.event = scope.finish();
  return result;
}

ElasticDispatchResult Internode::dispatch_elastic_again(const ElasticDispatchArguments& arguments,
                                                        const CallOptions& call) {
  const ElasticDispatchHandle& tables = *arguments.handle;
  DispatchHandle handle = tables.route;
  check_dispatch({.x = arguments.x, .x_scales = arguments.x_scales, .handle = &handle, .config = arguments.config},
                 runtime_);
  check_handle(handle);
  runtime_.faults().raise();
  handle.num_recv_rows = tables.local_topk_idx.size(0);
  const std::int64_t in_metadata = tables.metadata.size(0);
  check_range("number of rows in metadata", in_metadata, 0, handle.num_recv_rows);
  // Weights travel as scales, behind those that there are.
  SentRows rows = sent_rows(arguments.x, arguments.x_scales);
  const int num_scales = rows.rows.num_scales,
            num_weights = arguments.topk_weights ? static_cast<int>(tables.local_topk_idx.size(1)) : 0;
  rows.rows.num_scales += num_weights;
  if (arguments.topk_weights) rows.topk_weights = arguments.topk_weights->as<float>();
  check_room(rows.rows);

  CallScope scope(runtime_.calls(), call);
  std::optional<ConstTensorView> beside;
  if (rows.rows.num_scales != 0) {
    beside = unplaced(runtime_.device(), DType::int32, {arguments.x.size(0), rows.rows.num_scales});
  }
  const DispatchOutputs came =
      scope.inside([&] { return make_outputs(arguments.x, beside, nullptr, handle.num_recv_rows, scope); });
  send(rows, arguments.config, handle, came, num_weights, scope);

  ElasticDispatchResult result =
      make_elastic_results(arguments, tables, arguments.expand ? in_metadata : handle.num_recv_rows, scope);
  const auto* words = came.scales.as<std::uint32_t>();
  SpreadRowsParams moving = spreading_params({.rows = came.x.as<std::byte>(),
                                              .row_bytes = rows.rows.row_bytes,
                                              .scales = words,
                                              .weights = words + num_scales,
                                              .scale_stride = rows.rows.num_scales,
                                              .weight_stride = rows.rows.num_scales},
                                             result, arguments, tables, runtime_.faults().wait_context().abort);
  const LaunchShape shape = plan_spreading(moving, runtime_.policy());
  runtime_.executor()->kernels().spread_rows(moving, shape, scope.stream());
  hand_out(handle, scope);
  result.event = scope.finish();
  return result;
}

CombineResult Internode::combine_elastic(const ElasticCombineArguments& arguments, const CallOptions& call) {
  return combine_by_dispatch(arguments, *this, call);
}

EventHandle Internode::barrier(const CallOptions& call) {
  runtime_.faults().raise();
  CallScope scope(runtime_.calls(), call);
  // Counts of all ranks are exchanged, even where all are 0.
  const Tensor counts = scope.pool_tensor(unplaced(runtime_.device(), DType::int32, {runtime_.num_ranks()}));
  runtime_.executor()->fill(counts.data(), 0, counts.view().bytes(), scope.stream());
  DispatchArguments nothing;
  nothing.x = unplaced(runtime_.device(), DType::uint8, {0, 16});
  nothing.is_token_in_rank = unplaced(runtime_.device(), DType::uint8, {0, runtime_.num_ranks()});
  nothing.num_tokens_per_rank = nothing.num_tokens_per_expert = counts.view();
  nothing.num_worst_tokens = 1;
  const DispatchResult came = scope.inside([&] { return dispatch(nothing, scope); });
  return scope.finish();
}

}  // namespace deep_ep
