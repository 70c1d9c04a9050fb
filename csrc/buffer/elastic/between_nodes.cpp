// Dispatch of the second interface between nodes: a dispatch of normal mode brings the rows, and kernels number them
// and take them to the results.
#include <algorithm>

#include "csrc/buffer/elastic/elastic.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep {
namespace {

/// The handle of a fresh dispatch whose rows `came`.
ElasticDispatchHandle number_rows(const ElasticDispatchArguments& arguments, const DispatchResult& came,
                                  const NormalParams& common, Runtime& runtime, const CallScope& scope) {
  constexpr int kMostBlocks = 128;
  const DispatchHandle& route = came.handle;
  const LaunchPolicy& policy = runtime.policy();
  NumberRowsParams params{};
  params.wait = runtime.faults().wait_context();
  NumberingParams& numbers = params.numbers = numbering_params(arguments, runtime);
  numbers.warps = runtime.warps(kernels::number_selections::kMaxThreads);
  const std::size_t shared_bytes =
      fit_numbering(numbers, false, route.num_recv_rows * numbers.metadata.num_topk,
                    std::min(policy.multiprocessors, kMostBlocks), policy.max_shared_bytes);
  const LaunchShape shape{numbers.blocks, numbers.warps * 32, shared_bytes};
  params.recv_topk_idx = indices_of(came.recv_topk_idx->view());
  params.source = route.recv_src_idx.as<std::int32_t>();
  params.ends = route.rank_prefix_matrix.as<std::int32_t>() + common.grid.index();
  params.ends_stride = common.grid.width;
  ElasticDispatchHandle handle =
      make_elastic_tables(arguments, route.num_recv_rows, false, numbers, *common.state, scope);
  handle.num_expanded = expanded_rows(arguments, common.num_ranks, came.num_recv_tokens_per_expert);
  handle.route = route;
  handle.route.recv_src_idx = {};
  Backend& executor = *runtime.executor();
  executor.kernels().number_selections(params, shape, scope.stream());
  executor.fill(handle.rows_at_owners.data(), 0xff, handle.rows_at_owners.view().bytes(), scope.stream());
  if (arguments.copy_selections) {
    executor.copy(handle.topk_idx.data(), arguments.topk_idx.data, arguments.topk_idx.bytes(), scope.stream());
  }
  return handle;
}

}  // namespace

DispatchResult NormalMode::bring_elastic_rows(const ElasticDispatchArguments& arguments, DispatchArguments sent,
                                              CallScope& scope) {
  if (arguments.handle == nullptr) {
    const DispatchLayout layout = count(arguments.topk_idx, arguments.num_experts, scope);
    sent.use(layout);
    sent.num_worst_tokens = arguments.exact ? 0 : std::int64_t{common_.num_ranks} * arguments.max_tokens;
    return dispatch(sent, scope);
  }
  if (!arguments.topk_weights) sent.topk_idx.reset();  // they travel for the weights only
  SentRows rows = sent_rows(sent, arguments.num_experts / common_.num_ranks);
  rows.send_src_idx = false;
  check_room(rows.rows);
  DispatchResult came;
  came.handle = arguments.handle->route;
  came.handle.num_recv_rows = arguments.handle->local_topk_idx.size(0);
  const bool in_heap = make_room(sent, rows, came, scope);
  send(rows, arguments.num_sms, came, in_heap, scope);
  return came;
}

void NormalMode::dispatch_by_rails(ElasticDispatchResult& result, const ElasticDispatchArguments& arguments,
                                   const DispatchArguments& sent, CallScope& scope) {
  DispatchResult came = scope.inside([&] { return bring_elastic_rows(arguments, sent, scope); });
  const bool fresh = arguments.handle == nullptr;
  if (fresh) result.handle = number_rows(arguments, came, common_, runtime_, scope);
  const ElasticDispatchHandle& tables = fresh ? result.handle : *arguments.handle;
  make_elastic_results(result, arguments, tables, scope);
  const RowShape rows = sent_rows(sent, 0).rows;
  SpreadRowsParams moving{};
  moving.abort = runtime_.faults().wait_context().abort;
  moving.rows = came.recv_x.as<std::byte>();
  moving.row_bytes = rows.row_bytes;
  moving.scales = memory_of<std::uint32_t>(came.recv_x_scales);
  moving.scale_stride = rows.num_scales;
  moving.weights = memory_of<std::uint32_t>(came.recv_topk_weights);
  moving.weight_stride = rows.num_topk;
  spread_to(result, arguments, tables, moving);
  const LaunchShape spreading = plan_spreading(moving, runtime_.policy());
  runtime_.executor()->kernels().spread_rows(moving, spreading, scope.stream());
  result.num_recv_tokens_per_expert = std::move(came.num_recv_tokens_per_expert);
  hand_out(tables.route, scope);
}

}  // namespace deep_ep
