// low_latency_combine: what it does on this rank, launch.
#include <algorithm>
#include <cmath>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/low_latency/low_latency.hpp"
#include "csrc/support/format.hpp"
#include "kernels/low_latency/combine/shared.hpp"

namespace deep_ep {
namespace {

/// Warps that push a row together. On GPUs so many that each has all its loads under way at once; more if no block has
/// many rows.
constexpr int kGpuWarpsPerRow = 8;
constexpr int kGpuWarpsPerRowFew = 16;
constexpr int kHostWarpsPerRow = 2;

/// Does the call send rows that nobody has added up (kernels/low_latency/combine/unreduced.hpp)? The same on all ranks.
bool goes_unreduced(const LowLatencyCombineArguments& arguments, const LowLatencyCombineParams& params,
                    const LowLatencySetup& setup) {
  if (!arguments.return_recv_hook || setup.rdma() || setup.common.mask != nullptr) return false;
  if (arguments.handle->has_weights) return false;
  const std::size_t rows = static_cast<std::size_t>(params.max_tokens) * static_cast<std::size_t>(int{params.num_topk});
  const std::size_t of_source = params.common.window.source_bytes[static_cast<std::size_t>(LowLatencyKind::combine)];
  return rows * CombineRowFormat{params.hidden, 0}.bytes(false) <=
         of_source * static_cast<std::size_t>(int{params.common.num_ranks});
}

/// Average bytes of a row if every expert is equally likely: a rank, or by rails a node, sends a sum if it has two or
/// more of a token's selections.
LowLatencyRowBytes row_bytes(const LowLatencyCombineParams& params, const LowLatencySetup& setup) {
  const CombineRowFormat& format = params.format;
  const int ranks = params.common.num_ranks, topk = params.num_topk;
  const auto of_parts = [&](int parts) {  // of which one sends the row
    const double none = std::pow(1 - 1.0 / parts, topk), one = topk * std::pow(1 - 1.0 / parts, topk - 1) / parts;
    const double sums = none == 1 ? 1 : (1 - none - one) / (1 - none);
    return static_cast<std::size_t>(sums * format.bytes(true) + (1 - sums) * format.bytes(false));
  };
  const int width = setup.reach.rail_width;
  return {of_parts(ranks), width == 0 ? params.row_bytes : of_parts(ranks / width), params.row_bytes};
}

/// `unreduced`: groups share the selections of a row, too, where there are enough of them.
int warps_per_row(const LowLatencyCombinePlan& plan, bool unreduced, const LowLatencySetup& setup) {
  if (!setup.on_gpu()) return std::min(plan.warps, kHostWarpsPerRow);
  const std::int64_t pieces = unreduced ? int{plan.params.num_topk} : 1;
  const bool few = plan.params.expert_rows * pieces <= plan.most_working_blocks;
  return std::min(plan.warps, few ? kGpuWarpsPerRowFew : kGpuWarpsPerRow);
}

void set_overlap(LowLatencyCombineParams& params, const LowLatencyCombineArguments& arguments, bool unreduced,
                 const LowLatencySetup& setup) {
  const LowLatencyOverlap& overlap = *arguments.overlap;
  if (!arguments.return_recv_hook) throw InvalidArgument("overlap needs return_recv_hook");
  if (setup.rdma() || setup.common.mask != nullptr) {
    fail<Unsupported>("overlap needs a buffer {}: others add up rows before they send them, and wait for all of them",
                      setup.rdma() ? "whose ranks all reach each other by NVLink" : "made without low_latency.masking");
  }
  if (arguments.handle->has_weights) {
    throw Unsupported("overlap needs a dispatch without combine_weights: with them a row's parts leave as one sum");
  }
  if (!unreduced) {
    fail<Unsupported>(
        "overlap needs room for a row of each selection, max_tokens {} times top-k {} of {} each, in low_latency.bytes "
        "{}: make it larger",
        params.max_tokens, int{params.num_topk}, format_bytes(params.format.bytes(false)),
        setup.common.window.bytes_of_calls());
  }
  check_range("overlap.signal_rows", overlap.signal_rows, 0, INT32_MAX);
  check_range("overlap.expected", overlap.expected, 1, INT32_MAX);
  check_range("overlap.num_sms", overlap.num_sms, 0, INT32_MAX);
  const auto* words =
      checked_memory<std::int32_t>("overlap.signals", overlap.signals, setup.device, DType::int32, {kAnySize});
  if (!overlap.signals) return;
  const std::int64_t rows = params.expert_rows, experts = params.num_local_experts;
  const std::int64_t rows_of_word = overlap.signal_rows == 0 ? rows : overlap.signal_rows;
  const std::int64_t words_of_expert = (rows + rows_of_word - 1) / rows_of_word;
  if (overlap.signals->size(0) < experts * words_of_expert) {
    fail<InvalidArgument>("overlap.signals has {} elements, {} local experts with {} rows each need {}",
                          overlap.signals->size(0), experts, rows, experts * words_of_expert);
  }
  params.signals = {.words = reinterpret_cast<const std::uint32_t*>(words),
                    .words_of_expert = static_cast<int>(words_of_expert),
                    .rows_of_word = static_cast<int>(rows_of_word),
                    .expected = static_cast<std::uint32_t>(overlap.expected)};
}

/// Grid and shared memory of a part with at most `sms` blocks. `plan`: complete but for its parts.
LowLatencyPart plan_part(LowLatencyPhase phase, const LowLatencyCombinePlan& plan, int sms, bool unreduced) {
  const LowLatencyCombineParams& params = plan.params;
  const int groups = phase.sends ? plan.warps / static_cast<int>(params.warps_per_row) : 0;
  // As many blocks as have anything to do.
  using namespace device::low_latency;
  // Unreduced: groups share the selections of a row, and one more block waits for what all say. Two blocks add a token
  // where there are so many, but for ranks that RDMA reaches, or that calls may leave out. For others one more block
  // tells what concerns all ranks, if an SM is left for it.
  const int pieces = params.expert_rows * (unreduced ? int{params.num_topk} : 1);
  const int to_push = groups == 0 ? 0 : (pieces + groups - 1) / groups;
  const int waiting = unreduced && phase.receives && sms > 1 ? 1 : 0;
  const bool plain = plan.posters == 0 && params.common.mask == nullptr;
  const bool by_two = plain && 2 * params.num_tokens <= sms - waiting;
  const int blocks_of_token = !phase.receives ? (unreduced ? 0 : 1) : by_two ? 2 : 1;
  const int working = std::clamp(std::max(to_push, params.num_tokens * blocks_of_token), 1, sms - waiting);
  const int telling = plain && working < sms ? 1 : 0;
  const CombineShared shared{{Carver::without_memory(), params.common.num_ranks, plan.posters != 0 ? plan.warps : 0},
                             groups * params.held_up(groups * working)};
  return {phase, {working + telling + plan.posters, plan.warps * 32, shared.bytes}, working};
}

void check_handle(const LowLatencyHandle& handle, const LowLatencySetup& setup) {
  const int num_ranks = setup.common.num_ranks;
  if (!handle.row_table.defined()) {
    throw InvalidArgument("handle is empty: low_latency_combine needs the handle of a low_latency_dispatch");
  }
  check_range("handle.num_tokens", handle.num_tokens, 0, handle.max_tokens);
  check_experts("handle.num_experts", handle.num_experts, num_ranks, setup.max_local_experts);
  if (handle.has_weights && (setup.rdma() || setup.common.mask != nullptr)) {
    throw InvalidArgument("handle has weights, and is of another buffer: dispatches of this one do not carry any");
  }
  const LowLatencyRowTable table{nullptr, num_ranks, handle.max_tokens, handle.num_topk};
  check_tensor("handle.row_table", handle.row_table.view(), setup.device, {DType::int32},
               {table.height(handle.has_weights), num_ranks});
}

}  // namespace

LowLatencyCombinePlan plan_combine(const LowLatencyCombineArguments& arguments, const LowLatencySetup& setup) {
  const Device& device = setup.device;
  if (arguments.handle == nullptr) throw InvalidArgument("handle is missing");
  const LowLatencyHandle& handle = *arguments.handle;
  check_handle(handle, setup);
  const ConstTensorView &x = arguments.x, &idx = arguments.topk_idx;
  check_tensor("x", x, device, {DType::bfloat16},
               {handle.num_experts / setup.common.num_ranks, std::int64_t{handle.max_tokens} * setup.common.num_ranks,
                kAnySize});
  check_tensor("topk_idx", idx, device, {DType::int32, DType::int64}, {kAnySize, handle.num_topk});
  if (idx.size(0) != handle.num_tokens) {
    fail<InvalidArgument>("topk_idx has {} rows, but the handle's dispatch sent {} tokens", idx.size(0),
                          handle.num_tokens);
  }
  check_tensor("topk_weights", arguments.topk_weights, device, {DType::float32}, {idx.size(0), handle.num_topk});
  if (arguments.out) {
    check_tensor("out", *arguments.out, device, {DType::bfloat16}, {idx.size(0), x.size(2)});
    check_alignment("out", *arguments.out);
  }

  LowLatencyCombinePlan plan;
  LowLatencyCombineParams& params = plan.params;
  set_call(params, arguments, handle.max_tokens, handle.num_experts, kScaleChannels, setup);
  const bool unreduced = goes_unreduced(arguments, params, setup);
  params.format = CombineRowFormat{params.hidden, setup.rest_bits};
  params.row_bytes = params.format.bytes(!unreduced);
  params.row_lines = params.row_bytes / kTaggedLine;
  choose_rails(LowLatencyKind::combine, !arguments.return_recv_hook, params, row_bytes(params, setup), setup);
  if (arguments.overlap) set_overlap(params, arguments, unreduced, setup);
  params.call_shape = shape_of({params.max_tokens, params.num_topk, params.hidden, params.num_local_experts,
                                unreduced ? 1 : 0, params.common.rail_width, handle.has_weights ? 1 : 0},
                               31);
  params.row_table = handle.row_table.as<std::int32_t>();
  params.topk_weights = arguments.topk_weights.as<float>();

  plan.choose(unreduced            ? choices::combine_low_latency_unreduced
              : handle.has_weights ? choices::combine_low_latency_weighted
              : setup.rdma()       ? choices::combine_low_latency_rdma
                                   : choices::combine_low_latency,
              arguments.num_sms, 1, setup);
  const int sms = plan.most_working_blocks;
  const bool few = arguments.overlap && arguments.overlap->num_sms != 0;
  const int send_sms = few ? std::min(sms, arguments.overlap->num_sms) : sms;
  // With signals a warp has its own selections.
  params.warps_per_row = params.signals.words != nullptr ? 1 : warps_per_row(plan, unreduced, setup);
  plan.plan_parts(arguments.return_recv_hook, setup, [&](LowLatencyPhase phase) {
    return plan_part(phase, plan, !phase.receives ? send_sms : sms, unreduced);
  });
  return plan;
}

LowLatencyCombineResult Buffer::low_latency_combine(const LowLatencyCombineArguments& arguments,
                                                    const CallOptions& call) {
  const BufferCall in(runtime_, "low_latency_combine");
  LowLatency& mode = in.low_latency();
  LowLatencyCombinePlan plan = plan_combine(arguments, mode.setup_);
  CallScope scope = mode.begin(LowLatencyKind::combine, arguments.return_recv_hook, call);
  LowLatencyCombineResult result;
  if (arguments.out) {
    result.combined_x = Tensor::borrow(*arguments.out);
  } else {
    WantedTensors wanted(mode.setup_.device);
    wanted.add(result.combined_x, nullptr, DType::bfloat16, {plan.params.num_tokens, plan.params.hidden});
    scope.make_results(wanted);
  }
  plan.params.combined_x = result.combined_x.as<std::byte>();
  mode.launch(LowLatencyKind::combine, plan, scope, call.stream, result, arguments.handle->row_table, arguments.owner);
  return result;
}

}  // namespace deep_ep
