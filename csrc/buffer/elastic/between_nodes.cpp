// Dispatch of the second interface between nodes: a dispatch of normal mode brings the rows, and kernels number them
// and take them to the results.
#include <algorithm>

#include "csrc/buffer/elastic/elastic.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep {
namespace {

LaunchShape plan_numbering(NumberRowsParams& params, std::int64_t rows, const LaunchPolicy& policy, bool on_gpu) {
  NumberingParams& numbers = params.numbers;
  constexpr int kMostWarps = kernels::number_selections::kMaxThreads / 32, kMostBlocks = 128;
  numbers.warps = on_gpu ? kMostWarps : std::min(policy.warps_per_block, kMostWarps);
  const std::size_t bytes = fit_numbering(numbers, false, rows * numbers.metadata.num_topk,
                                          std::min(policy.multiprocessors, kMostBlocks), policy.max_shared_bytes);
  if (bytes > policy.max_shared_bytes) {
    fail<InvalidArgument>("num_local_experts is {}, allowed: as many as fit {} bytes of shared memory, {} each",
                          numbers.num_experts, policy.max_shared_bytes, 4 * sizeof(std::int32_t));
  }
  return {numbers.blocks, numbers.warps * 32, bytes};
}

}  // namespace

ElasticDispatchResult NormalMode::dispatch_elastic_by_rails(const ElasticDispatchArguments& arguments,
                                                            const CallOptions& call) {
  const ElasticDispatchHandle* const tables = arguments.handle;
  if (tables != nullptr) {
    check_dispatched(&tables->route, arguments.x.size(0));
    check_range("number of rows in metadata", tables->metadata.size(0), 0, tables->local_topk_idx.size(0));
  }
  CallScope scope = runtime_.begin(call);
  ElasticDispatchResult result =
      tables != nullptr ? dispatch_elastic_again(arguments, scope) : dispatch_elastic_fresh(arguments, scope);
  hand_out(tables != nullptr ? tables->route : result.handle.route, scope);
  result.event = scope.finish();
  return result;
}

ElasticDispatchResult NormalMode::dispatch_elastic_fresh(const ElasticDispatchArguments& arguments, CallScope& scope) {
  const int ranks = common_.num_ranks;
  DispatchArguments sent = as_dispatch(arguments);
  sent.num_worst_tokens = arguments.exact ? 0 : std::int64_t{ranks} * arguments.max_tokens;
  DispatchLayout layout;
  const DispatchResult came = scope.inside([&] {
    layout = count(arguments.topk_idx, arguments.num_experts, scope);
    sent.use(layout);
    return dispatch(sent, scope);
  });
  const DispatchHandle& route = came.handle;
  const std::int64_t received = route.num_recv_rows;

  NumberRowsParams numbers{};
  numbers.wait = runtime_.faults().wait_context();
  numbers.numbers = numbering_params(arguments, runtime_);
  numbers.recv_topk_idx = indices_of(came.recv_topk_idx->view());
  numbers.source = route.recv_src_idx.as<std::int32_t>();
  numbers.ends = route.rank_prefix_matrix.as<std::int32_t>() + common_.grid.index();
  numbers.ends_stride = common_.grid.width;
  const LaunchShape numbering = plan_numbering(numbers, received, runtime_.policy(), runtime_.on_gpu());
  ElasticDispatchHandle handle =
      make_elastic_tables(arguments, received, false, numbers.numbers, *common_.state, scope);
  handle.num_expanded = expanded_rows(arguments, ranks, came.num_recv_tokens_per_expert);
  handle.route = route;
  handle.route.recv_src_idx = {};
  Backend& executor = *runtime_.executor();
  executor.kernels().number_selections(numbers, numbering, scope.stream());
  executor.fill(handle.rows_at_owners.data(), 0xff, handle.rows_at_owners.view().bytes(), scope.stream());
  if (arguments.copy_selections) {
    executor.copy(handle.topk_idx.data(), arguments.topk_idx.data, arguments.topk_idx.bytes(), scope.stream());
  }

  ElasticDispatchResult result = make_elastic_results(arguments, handle, received, scope);
  const RowShape rows = sent_rows(sent, 0).rows;
  SpreadRowsParams moving{};
  moving.rows = came.recv_x.as<std::byte>();
  moving.row_bytes = rows.row_bytes;
  moving.scales = memory_of<std::uint32_t>(came.recv_x_scales);
  moving.scale_stride = rows.num_scales;
  moving.weights = memory_of<std::uint32_t>(came.recv_topk_weights);
  moving.weight_stride = arguments.topk_idx.size(1);
  spread(moving, result, arguments, handle, scope);
  result.num_recv_tokens_per_expert = came.num_recv_tokens_per_expert;
  result.handle = std::move(handle);
  return result;
}

ElasticDispatchResult NormalMode::dispatch_elastic_again(const ElasticDispatchArguments& arguments, CallScope& scope) {
  const ElasticDispatchHandle& tables = *arguments.handle;
  DispatchResult came;
  came.handle = tables.route;
  came.handle.num_recv_rows = tables.local_topk_idx.size(0);
  DispatchArguments sent = as_dispatch(arguments);
  if (!arguments.topk_weights) sent.topk_idx.reset();  // they travel for the weights only
  SentRows rows = sent_rows(sent, arguments.num_experts / common_.num_ranks);
  rows.send_src_idx = false;
  check_room(rows.rows);
  const bool in_heap = scope.inside([&] { return make_room(sent, came, scope); });
  send(rows, arguments.config, came, in_heap, scope);

  ElasticDispatchResult result = make_elastic_results(
      arguments, tables, arguments.expand ? tables.metadata.size(0) : came.handle.num_recv_rows, scope);
  SpreadRowsParams moving{};
  moving.rows = came.recv_x.as<std::byte>();
  moving.row_bytes = rows.rows.row_bytes;
  moving.scales = memory_of<std::uint32_t>(came.recv_x_scales);
  moving.weights = memory_of<std::uint32_t>(came.recv_topk_weights);
  moving.scale_stride = rows.rows.num_scales;
  moving.weight_stride = rows.rows.num_topk;
  spread(moving, result, arguments, tables, scope);
  return result;
}

void NormalMode::spread(SpreadRowsParams came, const ElasticDispatchResult& results,
                        const ElasticDispatchArguments& arguments, const ElasticDispatchHandle& handle,
                        const CallScope& scope) const {
  spread_to(results, arguments, handle, came);
  came.abort = runtime_.faults().wait_context().abort;
  const LaunchShape shape = plan_spreading(came, runtime_.policy());
  runtime_.executor()->kernels().spread_rows(came, shape, scope.stream());
}

}  // namespace deep_ep
