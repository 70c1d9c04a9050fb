// dispatch between nodes: exchange counts (unless a handle knows them), make room, send.
#include <array>

#include "csrc/buffer/internode/internode.hpp"
#include "csrc/buffer/row_stages.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "kernels/internode/dispatch_rows.hpp"

namespace deep_ep {

DispatchHandle Internode::notify(const DispatchArguments& arguments, CallScope& scope,
                                 std::vector<int>& tokens_per_expert) {
  const int nodes = grid_.nodes();
  DispatchHandle handle = begin_handle(arguments);
  const std::array wanted = {unplaced(setup_.device, DType::int32, {setup_.num_ranks, setup_.num_ranks}),
                             unplaced(setup_.device, DType::int32, {handle.num_tokens, setup_.num_ranks}),
                             unplaced(setup_.device, DType::int32, {handle.num_tokens, nodes}),
                             unplaced(setup_.device, DType::int32, {2, nodes})};
  const std::vector<Tensor> tables = scope.pool_tensors(wanted);
  handle.rank_prefix_matrix = tables[0];
  handle.destination_row = tables[1];
  handle.node_row = tables[2];
  handle.node_counts = tables[3];

  const bool exact = arguments.num_worst_tokens == 0;
  const auto make_relay_rows = [&](std::int64_t relayed) {
    handle.relay_rows = scope.pool_tensor(unplaced(setup_.device, DType::int32, {relayed, grid_.width}));
  };
  if (!exact) make_relay_rows(arguments.num_worst_tokens * grid_.width);  // it may throw: before the peers count on us
  HostCounts& counts = *host_counts_;
  InternodeNotifyParams params{};
  static_cast<NotifyCall&>(params) = notify_call(arguments, setup_);
  params.common = common_;
  params.wait = runtime_.faults().wait_context();
  params.destination_row = handle.destination_row.as<std::int32_t>();
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  params.node_row = handle.node_row.as<std::int32_t>();
  params.node_counts = handle.node_counts.as<std::int32_t>();
  params.host_counts = exact ? &counts : nullptr;
  if (exact) __atomic_store_n(&counts.epoch, 0, __ATOMIC_RELEASE);
  constexpr int kMost = kernels::notify_internode::kMaxThreads;
  const LaunchShape shape{std::min(setup_.num_ranks + nodes, setup_.policy.multiprocessors),
                          setup_.on_gpu() ? kMost : std::min(setup_.policy.warps_per_block * 32, kMost),
                          sizeof(InternodeNotifyShared)};
  runtime_.executor()->kernels().notify_internode(params, shape, scope.stream());

  handle.num_recv_rows = arguments.num_worst_tokens;
  if (exact) {
    wait_for_counts(runtime_, counts, scope);
    handle.num_recv_rows = counts.num_recv_tokens;
    make_relay_rows(counts.num_relay_rows);
    tokens_per_expert.assign(counts.tokens_per_expert, counts.tokens_per_expert + params.num_local_experts);
  }
  return handle;
}

void Internode::send(const SentRows& rows, const Config& config, const DispatchHandle& handle,
                     const DispatchOutputs& outputs, int weights, const CallScope& scope) {
  InternodeDispatchParams params{};
  static_cast<SentRows&>(params) = rows;
  params.weights_as_scales = weights;
  params.transfer = transfer(handle, PackedRow::bytes(params.rows, grid_.width), grid_.width);
  params.transfer.shape = shape_of({0, params.rows.row_bytes, static_cast<std::uint32_t>(params.rows.num_scales),
                                    static_cast<std::uint32_t>(params.rows.num_topk)});
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  params.relay_rows = handle.relay_rows.as<std::int32_t>();
  params.output = outputs.targets();
  params.output_rows = handle.num_recv_rows;

  const LaunchPolicy& policy = setup_.policy;
  const int sms = config.num_sms != 0 ? config.num_sms : Config::dispatch_default(setup_.num_ranks).num_sms;
  const int blocks = std::min(sms, policy.multiprocessors);
  const int most_warps = kernels::dispatch_and_notify_internode::kMaxThreads / 32;
  const int warps = plan_warps(params.transfer, config, blocks, most_warps, !outputs.in_heap);
  const auto shared_bytes = [&](int stages, std::uint32_t stage_bytes) {
    return InternodeDispatchShared(Carver::without_memory(), params.transfer, blocks, stages, stage_bytes).bytes;
  };
  const RowStages stages = RowStages::make((policy.max_shared_bytes - shared_bytes(RowStages::kMost, 0)) /
                                               static_cast<std::size_t>(params.transfer.moving_warps()),
                                           params.rows.row_bytes);
  params.stages = stages.count;
  params.stage_bytes = stages.bytes;
  runtime_.executor()->kernels().dispatch_and_notify_internode(
      params, {blocks, warps * 32, shared_bytes(stages.count, stages.bytes)}, scope.stream());
}

void Internode::hand_out(const DispatchHandle& handle, const CallScope& scope) {
  for (const Tensor* tensor : {&handle.recv_src_idx, &handle.destination_row, &handle.relay_rows}) {
    scope.hand_out(*tensor);
  }
}

DispatchResult Internode::dispatch(const DispatchArguments& arguments, const CallOptions& call) {
  check_dispatch(arguments, setup_);
  runtime_.faults().raise(Faults::Notes::but_unknown_experts);
  CallScope scope(runtime_.calls(), call);
  DispatchResult result = dispatch(arguments, scope);
  hand_out(result.handle, scope);
  scope.hand_out(result.recv_x);
  for (const auto* beside : {&result.recv_x_scales, &result.recv_topk_idx, &result.recv_topk_weights}) {
    if (*beside) scope.hand_out(**beside);
  }
  result.event = scope.finish();
  return result;
}

DispatchResult Internode::dispatch(const DispatchArguments& arguments, CallScope& scope) {
  const SentRows rows = sent_rows(arguments, setup_);
  check_room_for_dispatch(rows.rows);
  check_recording(scope, arguments.num_worst_tokens == 0);

  // Who gets what? And room for it: in the heap, where peers write the rows into place, or else by the local rings.
  const auto make_room = [&](std::int64_t rows) {
    return make_outputs(arguments.x, arguments.x_scales, &arguments, rows, scope);
  };
  DispatchOutputs outputs;
  if (arguments.num_worst_tokens != 0) outputs = make_room(arguments.num_worst_tokens);
  DispatchResult result;
  result.handle = notify(arguments, scope, result.num_recv_tokens_per_expert);
  if (arguments.num_worst_tokens == 0) outputs = make_room(result.handle.num_recv_rows);
  result.handle.recv_src_idx = outputs.src_idx;
  send(rows, arguments.config, result.handle, outputs, 0, scope);
  outputs.give_to(result, arguments);
  return result;
}

CachedDispatchResult Internode::dispatch(const CachedDispatchArguments& arguments, const CallOptions& call) {
  check_dispatch(arguments, setup_);
  check_handle(*arguments.handle);
  runtime_.faults().raise();
  const SentRows rows = sent_rows(arguments, setup_);
  check_room_for_dispatch(rows.rows);
  CallScope scope(runtime_.calls(), call);
  const DispatchHandle& handle = *arguments.handle;
  const DispatchOutputs outputs = make_outputs(arguments.x, arguments.x_scales, nullptr, handle.num_recv_rows, scope);
  send(rows, arguments.config, handle, outputs, 0, scope);
  hand_out(handle, scope);
  for (const Tensor* tensor : {&outputs.x, &outputs.scales}) scope.hand_out(*tensor);
  CachedDispatchResult result;
  outputs.give_to(result, arguments);
  result.event = scope.finish();
  return result;
}

}  // namespace deep_ep
