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

DispatchResult NormalMode::bring_elastic_rows(const ElasticDispatchArguments& arguments, CallScope& scope) {
  DispatchArguments sent = as_dispatch(arguments);
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
  send(rows, arguments.config, came, in_heap, scope);
  return came;
}

ElasticDispatchHandle NormalMode::number_elastic_rows(const ElasticDispatchArguments& arguments,
                                                      const DispatchResult& came, const CallScope& scope) const {
  const DispatchHandle& route = came.handle;
  NumberRowsParams numbers{};
  numbers.wait = runtime_.faults().wait_context();
  numbers.numbers = numbering_params(arguments, runtime_);
  numbers.recv_topk_idx = indices_of(came.recv_topk_idx->view());
  numbers.source = route.recv_src_idx.as<std::int32_t>();
  numbers.ends = route.rank_prefix_matrix.as<std::int32_t>() + common_.grid.index();
  numbers.ends_stride = common_.grid.width;
  const LaunchShape numbering = plan_numbering(numbers, route.num_recv_rows, runtime_.policy(), runtime_.on_gpu());
  ElasticDispatchHandle handle =
      make_elastic_tables(arguments, route.num_recv_rows, false, numbers.numbers, *common_.state, scope);
  handle.num_expanded = expanded_rows(arguments, common_.num_ranks, came.num_recv_tokens_per_expert);
  handle.route = route;
  handle.route.recv_src_idx = {};
  Backend& executor = *runtime_.executor();
  executor.kernels().number_selections(numbers, numbering, scope.stream());
  executor.fill(handle.rows_at_owners.data(), 0xff, handle.rows_at_owners.view().bytes(), scope.stream());
  if (arguments.copy_selections) {
    executor.copy(handle.topk_idx.data(), arguments.topk_idx.data, arguments.topk_idx.bytes(), scope.stream());
  }
  return handle;
}

ElasticDispatchResult NormalMode::dispatch_elastic_by_rails(const ElasticDispatchArguments& arguments,
                                                            const CallOptions& call) {
  const bool fresh = arguments.handle == nullptr;
  if (!fresh) check_dispatched(&arguments.handle->route, arguments.x.size(0));
  CallScope scope = runtime_.begin(call);
  const DispatchResult came = scope.inside([&] { return bring_elastic_rows(arguments, scope); });
  ElasticDispatchHandle handle;
  if (fresh) handle = number_elastic_rows(arguments, came, scope);
  const ElasticDispatchHandle& tables = fresh ? handle : *arguments.handle;

  ElasticDispatchResult result = make_elastic_results(arguments, tables, tables.metadata.size(0), scope);
  const RowShape rows = sent_rows(as_dispatch(arguments), 0).rows;
  SpreadRowsParams moving{};
  moving.rows = came.recv_x.as<std::byte>();
  moving.row_bytes = rows.row_bytes;
  moving.scales = memory_of<std::uint32_t>(came.recv_x_scales);
  moving.scale_stride = rows.num_scales;
  moving.weights = memory_of<std::uint32_t>(came.recv_topk_weights);
  moving.weight_stride = arguments.topk_idx.size(1);
  spread_to(result, arguments, tables, moving);
  moving.abort = runtime_.faults().wait_context().abort;
  const LaunchShape spreading = plan_spreading(moving, runtime_.policy());
  runtime_.executor()->kernels().spread_rows(moving, spreading, scope.stream());
  result.num_recv_tokens_per_expert = came.num_recv_tokens_per_expert;
  hand_out(tables.route, scope);
  result.handle = std::move(handle);
  result.event = scope.finish();
  return result;
}

}  // namespace deep_ep
