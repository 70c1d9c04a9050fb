// low_latency_combine, and the memory that experts may write its input to.
#include <algorithm>
#include <tuple>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/defaults.hpp"
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

/// Does the call send rows that nobody has added up (kernels/low_latency/combine/unreduced.cu)? The same on all ranks.
bool goes_unreduced(const LowLatencyCombineArguments& arguments, const LowLatencyCombineParams& params,
                    const LowLatencySetup& setup) {
  if (!arguments.return_recv_hook || setup.rdma() || setup.common.mask != nullptr) return false;
  const std::size_t rows = static_cast<std::size_t>(params.max_tokens) * static_cast<std::size_t>(int{params.num_topk});
  const std::size_t room = params.common.window.source_bytes * static_cast<std::size_t>(int{params.common.num_ranks});
  return rows * params.row_bytes <= room;
}

/// `unreduced`: groups share the selections of a row, too, where there are enough of them.
int warps_per_row(const LowLatencyCombineParams& params, int warps, int sms, bool unreduced,
                  const LowLatencySetup& setup) {
  if (!setup.on_gpu()) return std::min(warps, kHostWarpsPerRow);
  const int pieces = unreduced ? int{params.num_topk} : 1;
  const bool few = std::int64_t{params.common.num_ranks} * params.max_tokens * pieces <= sms;
  return std::min(warps, few ? kGpuWarpsPerRowFew : kGpuWarpsPerRow);
}

/// Words that an expert has, and rows that one of them stands for.
LowLatencySignals signals_of(const LowLatencyOverlap& overlap, std::int64_t expert_rows) {
  LowLatencySignals signals;
  if (!overlap.signals) return signals;
  signals.words = reinterpret_cast<const std::uint32_t*>(overlap.signals->as<std::int32_t>());
  const std::int64_t rows = overlap.signal_rows == 0 ? expert_rows : overlap.signal_rows;
  signals.rows_of_word = static_cast<int>(rows);
  signals.words_of_expert = static_cast<int>((expert_rows + rows - 1) / rows);
  signals.expected = static_cast<std::uint32_t>(overlap.expected);
  return signals;
}

void check_overlap(const LowLatencyCombineArguments& arguments, const LowLatencySetup& setup) {
  const LowLatencyOverlap& overlap = *arguments.overlap;
  const std::int64_t experts = arguments.x.size(0), rows = arguments.x.size(1);
  if (!arguments.return_recv_hook) throw InvalidArgument("overlap needs return_recv_hook");
  if (setup.rdma() || setup.common.mask != nullptr) {
    fail<Unsupported>("overlap needs a buffer {}: others add up rows before they send them, and wait for all of them",
                      setup.rdma() ? "whose ranks all reach each other by NVLink" : "made without low_latency.masking");
  }
  check_range("overlap.signal_rows", overlap.signal_rows, 0, INT32_MAX);
  check_range("overlap.expected", overlap.expected, 1, INT32_MAX);
  check_range("overlap.num_sms", overlap.num_sms, 0, INT32_MAX);
  if (!overlap.signals) return;
  check_tensor("overlap.signals", *overlap.signals, setup.device, {DType::int32}, {kAnySize});
  const std::int64_t words = experts * signals_of(overlap, rows).words_of_expert;
  if (overlap.signals->size(0) < words) {
    fail<InvalidArgument>("overlap.signals has {} elements, {} local experts with {} rows each need {}",
                          overlap.signals->size(0), experts, rows, words);
  }
}

/// Grid and shared memory of a part. `params`: complete but for the part's.
LowLatencyPart plan_part(LowLatencyPhase phase, const LowLatencyCombineParams& params, int warps, int sms,
                         bool unreduced, const LowLatencySetup& setup) {
  const int ranks = params.common.num_ranks;
  const int groups = sends(phase) ? warps / static_cast<int>(params.warps_per_row) : 0;
  // As many blocks as have anything to do.
  using namespace device::low_latency;
  // Unreduced: groups share the selections of a row, two blocks a token where there are so many, and one more block
  // waits for what all say.
  const int to_push = rows_of_group(ranks, params.max_tokens * (unreduced ? int{params.num_topk} : 1), groups);
  const int waiting = unreduced && receives(phase) && sms > 1 ? 1 : 0;
  const int blocks_of_token = !unreduced ? 1 : !receives(phase) ? 0 : 2 * params.num_tokens <= sms - waiting ? 2 : 1;
  LowLatencyPart part{.phase = phase};
  part.working_blocks = std::clamp(std::max(to_push, params.num_tokens * blocks_of_token), 1, sms - waiting);
  if (sends(phase) && params.signals.words != nullptr) {
    part.rows_of_group = rows_of_group(ranks, params.max_tokens, groups * part.working_blocks);
  }
  const int posters = poster_blocks(setup, warps);
  const device::low_latency::CombineShared shared(Carver::without_memory(), posters != 0 ? warps : 0,
                                                  groups * part.rows_of_group);
  part.shape = {part.working_blocks + waiting + posters, warps * 32, shared.bytes};
  return part;
}

/// Room of recv_x for each local expert.
std::int64_t expert_rows(const LowLatencyHandle& handle, const LowLatencySetup& setup) {
  return std::int64_t{handle.max_tokens} * setup.common.num_ranks;
}

void check_handle(const LowLatencyHandle& handle, const LowLatencySetup& setup) {
  const int num_ranks = setup.common.num_ranks;
  if (!handle.row_table.defined()) {
    throw InvalidArgument("handle is empty: low_latency_combine needs the handle of a low_latency_dispatch");
  }
  check_range("handle.max_tokens", handle.max_tokens, 1, kMostLowLatencyTokens);
  check_range("handle.num_tokens", handle.num_tokens, 0, handle.max_tokens);
  check_range("handle.num_experts", handle.num_experts, 1, kMostLowLatencyExperts);
  check_range("handle.num_topk", handle.num_topk, 1, kMaxTopk);
  if (handle.num_experts % num_ranks != 0) {
    fail<InvalidArgument>("handle.num_experts is {}, allowed: a multiple of the {} ranks", handle.num_experts,
                          num_ranks);
  }
  check_tensor("handle.row_table", handle.row_table.view(), setup.device, {DType::int32},
               {2 + std::int64_t{handle.max_tokens} * (1 + handle.num_topk), num_ranks});
}

void check_combine(const LowLatencyCombineArguments& arguments, const LowLatencySetup& setup) {
  const Device& device = setup.device;
  if (arguments.handle == nullptr) throw InvalidArgument("handle is missing");
  const LowLatencyHandle& handle = *arguments.handle;
  check_handle(handle, setup);
  const ConstTensorView& x = arguments.x;
  check_tensor("x", x, device, {DType::bfloat16},
               {handle.num_experts / setup.common.num_ranks, expert_rows(handle, setup), kAnySize});
  check_call(arguments, kScaleChannels, setup);
  const ConstTensorView& idx = arguments.topk_idx;
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
  if (arguments.overlap) check_overlap(arguments, setup);
}

}  // namespace

LowLatencyCombinePlan plan_combine(const LowLatencyCombineArguments& arguments, const LowLatencySetup& setup) {
  const LowLatencyHandle& handle = *arguments.handle;
  LowLatencyCombinePlan plan;
  LowLatencyCombineParams& params = plan.params;
  set_call(params, arguments, handle.max_tokens, handle.num_experts, setup);
  params.row_bytes = device::low_latency::CombineWire{params.hidden}.bytes();
  choose_rails(!arguments.return_recv_hook, params, params.row_bytes, params.row_bytes, setup);
  const bool unreduced = goes_unreduced(arguments, params, setup);
  if (arguments.overlap && !unreduced) {
    fail<Unsupported>(
        "overlap needs room for a row of each selection, max_tokens {} times top-k {} of {} each, in low_latency.bytes "
        "{}: make it larger",
        params.max_tokens, int{params.num_topk}, format_bytes(params.row_bytes), setup.low_latency_bytes);
  }
  params.call_shape = call_shape_of({params.max_tokens, params.num_topk, params.hidden, params.num_local_experts,
                                     unreduced ? 1 : 0, params.common.rail_width});
  params.row_table = handle.row_table.as<const std::int32_t>();
  params.topk_weights = arguments.topk_weights.as<float>();

  const auto kernel = unreduced      ? choices::combine_low_latency_unreduced
                      : setup.rdma() ? choices::combine_low_latency_rdma
                                     : choices::combine_low_latency;
  plan.kernel = kernel.launcher;
  const int warps = warps_of_block(setup, kernel.max_threads);
  const int others = poster_blocks(setup, warps);
  const int sms = most_working_blocks(arguments.config, setup, others);
  params.warps_per_row = warps_per_row(params, warps, sms, unreduced, setup);
  int send_sms = sms;
  if (arguments.overlap) {
    params.signals = signals_of(*arguments.overlap, params.expert_rows());
    if (params.signals.words != nullptr) params.warps_per_row = 1;  // a warp has its own selections
    if (arguments.overlap->num_sms != 0) send_sms = std::min(sms, arguments.overlap->num_sms);
  }
  plan_parts(plan, arguments.return_recv_hook, setup, [&](LowLatencyPhase phase) {
    return plan_part(phase, params, warps, phase == LowLatencyPhase::send ? send_sms : sms, unreduced, setup);
  });
  return plan;
}

LowLatencyCombineResult LowLatency::combine(const LowLatencyCombineArguments& arguments, const CallOptions& call) {
  check_combine(arguments, setup_);
  LowLatencyCombinePlan plan = plan_combine(arguments, setup_);
  begin(LowLatencyKind::combine, arguments.return_recv_hook, call);

  CallScope scope(runtime_.calls(), call);
  scope.without_event();
  LowLatencyCombineResult result;
  if (arguments.out) {
    result.combined_x = Tensor::borrow(*arguments.out);
  } else {
    const std::vector wanted = {unplaced(setup_.device, DType::bfloat16, {plan.params.num_tokens, plan.params.hidden})};
    result.combined_x = scope.result_tensors({&wanted, 1}).front();
  }
  plan.params.combined_x = result.combined_x.as<std::byte>();
  const auto keep = [&] { return std::tuple(result.combined_x, arguments.handle->row_table, arguments.owner); };
  result.event = launch(LowLatencyKind::combine, plan, scope, call.stream, keep, result.hook);
  return result;
}

TensorView LowLatency::combine_buffer(const LowLatencyHandle& handle) {
  check_handle(handle, setup_);
  TensorView view =
      unplaced(setup_.device, DType::bfloat16,
               {handle.num_experts / setup_.common.num_ranks, expert_rows(handle, setup_), handle.hidden});
  if (view.bytes() > combine_buffer_bytes_) {
    runtime_.executor()->make_current();
    combine_buffers_.push_back(device_memory<std::byte>(runtime_.executor(), view.bytes()));
    combine_buffer_bytes_ = view.bytes();
  }
  view.data = combine_buffers_.empty() ? nullptr : combine_buffers_.back().get();
  return view;
}

}  // namespace deep_ep
