// low_latency_dispatch: what it does on this rank, room for what comes, launch.
#include <algorithm>
#include <bit>
#include <utility>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/low_latency/call_shape.hpp"
#include "csrc/buffer/low_latency/low_latency.hpp"
#include "csrc/support/format.hpp"
#include "kernels/low_latency/dispatch/send.hpp"

namespace deep_ep {
namespace {

/// Grid and shared memory of a part. `plan`: complete but for its parts.
LowLatencyPart plan_part(LowLatencyPhase phase, const LowLatencyDispatchPlan& plan) {
  const LowLatencyDispatchParams& params = plan.params;
  const int ranks = params.common.num_ranks;
  const int to_send = phase.sends ? std::max(params.num_tokens, 1) + 1 : 1;  // one block sends counts
  // Few rows are best spread over many SMs.
  const int to_receive = phase.receives ? int{params.expert_rows} : 0;
  const int working = std::min(std::max(to_send, to_receive), plan.most_working_blocks);
  // One more block acknowledges the call before, if an SM is left for it.
  const int telling = plan.posters == 0 && working < plan.most_working_blocks ? 1 : 0;
  const bool by_rails = params.common.rail_width != 0;
  const device::low_latency::DispatchShared shared{
      {Carver::without_memory(), ranks, plan.posters != 0 ? plan.warps : 0},
      params.num_experts(),
      phase.sends ? params.row(by_rails, params.weighted).stage_bytes() : 0};
  return {phase, {working + telling + plan.posters, plan.warps * 32, shared.bytes}, working};
}

int warps_per_row(const LowLatencyDispatchPlan& plan, const LowLatencySetup& setup) {
  const bool few = plan.params.expert_rows <= plan.most_working_blocks;
  if (setup.on_gpu() && few) return plan.warps;  // no block has two rows
  if (plan.warps % 4 == 0 && plan.warps >= 12) return 4;
  return plan.warps % 2 == 0 && plan.warps >= 8 ? 2 : 1;
}

void set_arrivals(LowLatencyDispatchParams& params, const LowLatencyDispatchArguments& arguments,
                  const LowLatencySetup& setup) {
  const int step = arguments.arrival_rows;
  if (!arguments.arrival_counters) {
    if (step == 0) return;
    fail<InvalidArgument>("arrival_rows is {}, which needs arrival_counters", step);
  }
  if (setup.common.mask != nullptr) {
    throw InvalidArgument("arrival_counters need a buffer made without low_latency.masking, which may take back rows");
  }
  constexpr int kMostRows = (1 << 20) - 1;  // so that rows alone never complete a word
  constexpr int kAllRows = 30;
  if (step < 0 || step > kMostRows || (step & (step - 1)) != 0) {
    fail<InvalidArgument>("arrival_rows is {}, allowed: 0, or a power of two up to {}", step, (kMostRows + 1) / 2);
  }
  const int rows = params.expert_rows;
  if (step == 0) check_range("rows that one word of arrival_counters stands for", rows, 1, kMostRows);
  params.arrival_shift = step == 0 ? kAllRows : std::countr_zero(static_cast<unsigned>(step));
  params.arrival_words = ((rows - 1) >> params.arrival_shift) + 1;
  params.arrivals = checked_memory<std::int64_t>("arrival_counters", arguments.arrival_counters, setup.device,
                                                 DType::int64, {params.num_local_experts, params.arrival_words});
}

void want_rows(WantedTensors& wanted, LowLatencyDispatchResult& result, LowLatencyDispatchParams& params,
               const Device& device) {
  const std::int64_t blocks = params.num_local_experts, rows = params.expert_rows, hidden = params.hidden;
  const LowLatencyScales layout = params.scale_layout();
  const bool scaled = params.row(false, params.weighted).scaled(), tiled = scaled && layout.tiled();
  const DType dtype = tiled ? DType::uint8 : scaled ? DType::float8_e4m3 : DType::bfloat16;
  wanted.add(result.recv_x, &params.recv_x, dtype, {blocks, rows, tiled ? hidden / 2 : hidden});
  if (!scaled) return;
  TensorView scales =
      unplaced(device, layout.packed() ? DType::int32 : DType::float32, {blocks, layout.columns(), rows});
  std::swap(scales.shape[1], scales.shape[2]);  // column-major
  std::swap(scales.strides[1], scales.strides[2]);
  if (tiled) {
    scales =
        unplaced(device, DType::uint8, {blocks, layout.tiles(), layout.columns(), 4 * LowLatencyScales::kTileRows});
  }
  wanted.add(result.recv_x_scales.emplace(), &params.recv_scales, scales);
}

LowLatencyCallShape shape_of_call(const LowLatencyDispatchParams& params, bool too_many) {
  return {{params.max_tokens, params.hidden, params.num_local_experts, static_cast<int>(params.format), params.num_topk,
           params.common.rail_width, params.weighted ? 1 : 0, too_many ? 1 : 0}};
}

}  // namespace

LowLatencyDispatchPlan plan_dispatch(const LowLatencyDispatchArguments& arguments, const LowLatencySetup& setup) {
  const Device& device = setup.device;
  const ConstTensorView &x = arguments.x, &topk_idx = arguments.topk_idx;
  check_tensor("x", x, device, {DType::bfloat16}, {kAnySize, kAnySize});
  check_tensor("topk_idx", topk_idx, device, {DType::int32, DType::int64}, {x.size(0), kAnySize});
  check_range("width of topk_idx", topk_idx.size(1), 1, kMaxTopk);
  // Counts have 16 bits: of rows, and of a selection's place among the rows of its expert.
  const std::int64_t topk = topk_idx.size(1);
  if (arguments.max_tokens < 1 || arguments.max_tokens > kMostLowLatencyTokens / topk) {
    fail<InvalidArgument>(
        "low_latency_dispatch: max_tokens is {}, allowed: 1 to {}, as max_tokens times top-k, which is {}, is at most "
        "{}",
        arguments.max_tokens, kMostLowLatencyTokens / topk, topk, kMostLowLatencyTokens);
  }
  check_experts("num_experts", arguments.num_experts, setup.common.num_ranks, setup.max_local_experts);
  check_range("rows of the output of low_latency_dispatch (local experts * ranks * max_tokens)",
              std::int64_t{arguments.num_experts} * arguments.max_tokens, 1, INT32_MAX);

  LowLatencyDispatchPlan plan;
  LowLatencyDispatchParams& params = plan.params;
  const int channels = arguments.format == LowLatencyFormat::fp8_ue8m0 ? 4 * kScaleChannels : kScaleChannels;
  set_call(params, arguments, arguments.max_tokens, arguments.num_experts, channels, setup);
  params.count_cells = 1 + (params.num_local_experts + 1) / 2;
  params.format = arguments.format;
  if (arguments.x_global_scale && params.format != LowLatencyFormat::nvfp4) {
    throw InvalidArgument("x_global_scale needs rows in NVFP4");
  }
  params.global_scale = checked_memory<float>("x_global_scale", arguments.x_global_scale, device, DType::float32, {1});
  params.recv_stats =
      checked_memory<std::int32_t>("cumulative_local_expert_recv_stats", arguments.cumulative_local_expert_recv_stats,
                                   device, DType::int32, {params.num_local_experts});
  params.combine_weights =
      checked_memory<float>("combine_weights", arguments.combine_weights, device, DType::float32, {x.size(0), topk});
  // Not where a rank may be left out, and not where other ranks have to know which rows an owner expects.
  params.weighted = arguments.combine_weights && !setup.rdma() && setup.common.mask == nullptr;
  set_arrivals(params, arguments, setup);
  choose_rails(LowLatencyKind::dispatch, !arguments.return_recv_hook, params,
               {params.row(false, params.weighted).bytes(), params.row(true, params.weighted).bytes(), 0}, setup);
  params.call_shape = shape_of_call(params, too_many_tokens(arguments)).hash();
  if (too_many_tokens(arguments)) params.num_tokens = 0;

  plan.choose(params.weighted ? choices::dispatch_low_latency_weighted
              : setup.rdma()  ? choices::dispatch_low_latency_rdma
                              : choices::dispatch_low_latency,
              arguments.num_sms, 2, setup);
  params.warps_per_row = warps_per_row(plan, setup);
  plan.plan_parts(arguments.return_recv_hook, setup, [&](LowLatencyPhase phase) { return plan_part(phase, plan); });
  return plan;
}

LowLatencyDispatchResult Buffer::low_latency_dispatch(const LowLatencyDispatchArguments& arguments,
                                                      const CallOptions& call) {
  const BufferCall in(runtime_, "low_latency_dispatch");
  LowLatency& mode = in.low_latency();
  LowLatencyDispatchPlan plan = plan_dispatch(arguments, mode.setup_);
  CallScope scope = mode.begin(LowLatencyKind::dispatch, arguments.return_recv_hook, call);

  LowLatencyDispatchParams& params = plan.params;
  in->faults().shapes().note(shape_of_call(params, too_many_tokens(arguments)));
  const std::int64_t ranks = params.common.num_ranks, blocks = params.num_local_experts;
  LowLatencyDispatchResult result;
  LowLatencyHandle& handle = result.handle;
  handle = {.num_tokens = params.num_tokens,
            .max_tokens = params.max_tokens,
            .num_topk = params.num_topk,
            .num_experts = arguments.num_experts,
            .hidden = params.hidden,
            .has_weights = params.weighted};
  WantedTensors wanted(mode.setup_.device);
  want_rows(wanted, result, params, mode.setup_.device);
  wanted.begin_piece();  // the rows are large and often dropped early
  wanted.add(result.recv_count, &params.recv_count, DType::int32, {blocks});
  wanted.add(handle.layout_range, &params.layout_range, DType::int64, {blocks, ranks});
  wanted.add(handle.src_info, &params.src_info, DType::int32, {blocks, params.expert_rows});
  wanted.add(handle.row_table, &params.row_table, DType::int32, {params.table().height(params.weighted), ranks});
  scope.make_results(wanted, false, 3);

  mode.launch(LowLatencyKind::dispatch, plan, scope, call.stream, result, arguments.owner);
  if (too_many_tokens(arguments)) {
    if (result.hook) result.hook();
    check_range("number of tokens (rows of x)", arguments.x.size(0), 0, arguments.max_tokens);
  }
  return result;
}

}  // namespace deep_ep
