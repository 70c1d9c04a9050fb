#include "csrc/buffer/intranode/intranode.hpp"

#include <algorithm>
#include <array>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/row_launch.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "kernels/elastic/params.hpp"
#include "kernels/intranode/combine_shared.hpp"
#include "kernels/intranode/dispatch_shared.hpp"

namespace deep_ep {
namespace {

LaunchShape plan_launch(DispatchParams& params, const Config& config, const NormalModeSetup& setup) {
  const int warps = config.warps_per_block != 0 ? config.warps_per_block : setup.policy.warps_per_block;
  const int useful = std::max(1, (params.num_tokens + warps - 1) / warps);
  const std::size_t shared_bytes =
      plan_stages(params.stages, params.stage_bytes, warps, params.rows.row_bytes, setup.policy.max_shared_bytes,
                  [&](int stages, std::uint32_t stage_bytes) {
                    return DispatchShared(Carver::without_memory(), setup.num_ranks, warps, stages, stage_bytes).bytes;
                  });
  return {std::min(setup.sms(config, Config::dispatch_default(setup.num_ranks)), useful), warps * 32, shared_bytes};
}

/// The window as a place for all rows at once, if it has room for them.
std::optional<RowTargets> whole_window(std::byte* window, std::int64_t rows, const RowShape& shape,
                                       const NormalModeSetup& setup) {
  constexpr std::size_t kPadding = RowTargets::kParts * kLine;
  const auto count = static_cast<std::size_t>(rows);
  const std::size_t bytes = setup.window_bytes;
  if (bytes < kPadding || (bytes - kPadding) / shape.all_bytes() < count) return std::nullopt;
  return RowTargets::carve(Carver(window), shape, count);
}

/// For rows that fit neither the heap nor the window at once: how they go through the window. OutOfMemory when it is
/// too small.
void plan_window(DispatchParams& params, std::byte* window, const NormalModeSetup& setup) {
  const std::size_t row = params.rows.all_bytes();
  const auto ranks = static_cast<std::size_t>(setup.num_ranks);
  const std::size_t padding = RowTargets::kParts * kLine;
  const std::size_t rows = (setup.window_bytes - std::min(setup.window_bytes, padding)) / (row * ranks);
  if (rows == 0) {
    fail<OutOfMemory>(
        "a heap of {} cannot hold the {} rows of this dispatch, and its window of {} not one row of {} "
        "from each of the {} ranks: raise heap_bytes or window_bytes",
        format_bytes(setup.heap_bytes), params.output_rows, format_bytes(setup.window_bytes), format_bytes(row),
        setup.num_ranks);
  }
  params.window_rows = static_cast<std::uint32_t>(std::min<std::size_t>(rows, INT32_MAX / ranks));
  check_range("rounds that the rows take through the window (raise window_bytes)",
              params.output_rows / params.window_rows + 1, 1, kMostRounds);
  params.window = RowTargets::carve(Carver(window), params.rows, ranks * params.window_rows);
}

// About 32 pushing warps in all saturate NVLink; more get in each other's way (results/measurements/). Few blocks have
// more of them each, but not so many that too few warps are left to add.
constexpr int kGpuWarps = kernels::combine::kMaxThreads / 32;
constexpr int kGpuPushingWarpsInAll = 32;
constexpr int kGpuFewestPushingWarps = 2;
constexpr int kGpuMostPushingWarps = 4;

/// In how many parts each of the tokens is added, by so many warps. A warp that adds a whole token looks its rows up
/// once, and keeps most pieces of them under way; where a warp gets few tokens, all warps end at the same time only if
/// tokens are cut.
int parts_per_token(int tokens, int warps) {
  constexpr int kTokensOfWarp = 20;
  if (tokens >= kTokensOfWarp * warps) return 1;
  return 2 * tokens >= kTokensOfWarp * warps ? 2 : 4;
}

/// How rows that peers push go through this rank's window.
void plan_window(CombineParams& params, const NormalModeSetup& setup) {
  PushWindow& window = params.window;
  window.stride = PushWindow::stride_for(params.row_bytes, params.num_topk);
  const std::size_t bytes_of_token = static_cast<std::size_t>(setup.num_ranks) * window.stride;
  const std::size_t fits =
      std::min<std::size_t>(setup.window_bytes / bytes_of_token, static_cast<std::size_t>(setup.max_window_tokens));
  if (fits < kWindowRounds) {
    fail<OutOfMemory>(
        "the window of {} does not hold {} rows of {} from each of the {} ranks: raise heap_bytes or "
        "window_bytes",
        format_bytes(setup.window_bytes), kWindowRounds, format_bytes(window.stride), setup.num_ranks);
  }
  if (fits >= static_cast<std::size_t>(params.num_tokens)) {
    window.tokens = window.tokens_per_round = std::max(1, params.num_tokens);
    return;
  }
  window.tokens_per_round = static_cast<int>(fits / kWindowRounds);
  window.tokens = kWindowRounds * window.tokens_per_round;
  check_range("rounds that the tokens take through the window (raise window_bytes)",
              params.num_tokens / window.tokens_per_round + 1, 1, kMostRounds);
}

/// The roles of the warps of each of `blocks` blocks. Where this rank pushes, one raises flags, and the others share
/// adding and pushing. Returns how many there are.
int plan_warps(CombineParams& params, int blocks, const Config& config, const NormalModeSetup& setup) {
  const bool gpu = setup.on_gpu();
  const int flag_warps = params.push ? 1 : 0;
  if (config.warps_per_block == 0 && gpu) {
    const int share = (kGpuPushingWarpsInAll + blocks - 1) / blocks;
    params.pushing_warps = params.push ? std::clamp(share, kGpuFewestPushingWarps, kGpuMostPushingWarps) : 0;
    params.adding_warps = kGpuWarps - params.pushing_warps - flag_warps;
  } else {
    const int wanted = config.warps_per_block != 0 ? config.warps_per_block : setup.policy.warps_per_block;
    const int rest = std::max(wanted - flag_warps, params.push ? 2 : 1);
    params.pushing_warps = params.push ? std::max(1, rest / 3) : 0;
    params.adding_warps = rest - params.pushing_warps;
  }
  params.parts_per_token = parts_per_token(params.num_tokens, blocks * params.adding_warps);
  params.pushing_blocks = gpu ? std::max(1, kGpuPushingWarpsInAll / std::max(1, params.pushing_warps)) : INT32_MAX;
  return params.adding_warps + params.pushing_warps + flag_warps;
}

LaunchShape plan_launch(CombineParams& params, const Config& config, const NormalModeSetup& setup) {
  const int blocks = setup.sms(config, Config::combine_default(setup.num_ranks));
  const int warps = plan_warps(params, blocks, config, setup);
  const auto shared_bytes = [&](int stages, std::uint32_t stage_bytes) {
    return CombineShared(Carver::without_memory(), setup.num_ranks, params.pushing_warps, stages, stage_bytes).bytes;
  };
  if (params.push) {  // warps that add work in registers
    plan_stages(params.stages, params.stage_bytes, params.pushing_warps, params.row_bytes,
                setup.policy.max_shared_bytes, shared_bytes);
  }
  return {blocks, warps * 32, shared_bytes(params.stages, params.stage_bytes)};
}

}  // namespace

Intranode::Intranode(Runtime& runtime) : NormalMode(runtime) {
  allocate();
  state_ = runtime.zeroed_memory<KernelState>();
  common_.rank = runtime.rank();
  common_.num_ranks = runtime.num_ranks();
  common_.heaps = runtime.heap()->device_peers();
  common_.control = runtime.layout().control;
  common_.state = state_.get();
}

EventHandle Intranode::barrier(const CallOptions& call) {
  runtime_.faults().raise();
  CallScope scope(runtime_.calls(), call);
  const int most = runtime_.policy().warps_per_block * 32;
  const int threads = std::min((setup_.num_ranks + 31) / 32 * 32, std::min(most, kernels::barrier::kMaxThreads));
  runtime_.executor()->kernels().barrier({common_, runtime_.faults().wait_context()},
                                         {1, threads, sizeof(std::int32_t)}, scope.stream());
  return scope.finish();
}

void Intranode::notify(const NotifyCall& notify, DispatchHandle& handle, const CallScope& scope) {
  const std::array wanted = {unplaced(setup_.device, DType::int32, {setup_.num_ranks, setup_.num_ranks}),
                             unplaced(setup_.device, DType::int32, {handle.num_tokens, setup_.num_ranks})};
  const std::vector<Tensor> tables = scope.pool_tensors(wanted);
  handle.rank_prefix_matrix = tables[0];
  handle.destination_row = tables[1];
  NotifyParams params{notify, common_};
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  params.destination_row = handle.destination_row.as<std::int32_t>();
  const LaunchShape shape{std::min(setup_.num_ranks, setup_.policy.multiprocessors),
                          setup_.on_gpu() ? kernels::notify::kMaxThreads : setup_.policy.warps_per_block * 32,
                          sizeof(NotifyShared)};
  runtime_.executor()->kernels().notify(params, shape, scope.stream());
}

void Intranode::send(const SentRows& rows, const Config& config, const DispatchHandle& handle,
                     const DispatchOutputs& outputs, int /*weights*/, const CallScope& scope) {
  DispatchParams params{};
  static_cast<SentRows&>(params) = rows;
  const LaunchShape shape = plan_launch(params, config, setup_);
  params.common = common_;
  params.wait = runtime_.faults().wait_context();
  params.destination_row = handle.destination_row.as<std::int32_t>();
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  params.output = outputs.targets();
  params.output_rows = handle.num_recv_rows;
  // Peers write rows into place in the heap. Elsewhere they are copied from the window, all at once if it holds all.
  const std::optional<RowTargets> landed =
      outputs.in_heap ? std::nullopt : whole_window(runtime_.window(), handle.num_recv_rows, params.rows, setup_);
  if (landed) {
    params.output = *landed;
  } else if (!outputs.in_heap) {
    plan_window(params, runtime_.window(), setup_);
  }
  const KernelTable& kernels = runtime_.executor()->kernels();
  kernels.dispatch(params, shape, scope.stream());
  if (!landed) return;
  CopyReceivedParams copying{};
  copying.rows = params.rows;
  copying.from = *landed;
  copying.to = outputs.targets();
  copying.num_rows = handle.num_recv_rows;
  copying.num_valid = params.rank_prefix_matrix + (common_.num_ranks - 1) * common_.num_ranks + common_.rank;
  const LaunchShape all = shape_for_pipelines(copying.num_rows, copying.rows.row_bytes, runtime_.executor()->policy(),
                                              kernels::copy_received::kMaxThreads, copying.stages, copying.stage_bytes);
  kernels.copy_received(copying, all, scope.stream());
}

void Intranode::add_up(const CombineArguments& arguments, const CombineResult& result, const CallScope& scope) {
  const ConstTensorView& x = arguments.x;
  const auto& weights = arguments.topk_weights;
  const DispatchHandle& handle = *arguments.handle;
  CombineParams params{};
  params.common = common_;
  params.wait = runtime_.faults().wait_context();
  params.num_tokens = static_cast<int>(handle.num_tokens);
  params.row_bytes = static_cast<std::uint32_t>(x.size(1) * 2);
  params.num_topk = weights ? static_cast<int>(weights->size(1)) : 0;
  params.destination_row = handle.destination_row.as<std::int32_t>();
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  params.recv_src_idx = handle.recv_src_idx.as<std::int32_t>();
  params.bias[0] = arguments.bias_0 ? arguments.bias_0->as<std::byte>() : nullptr;
  params.bias[1] = arguments.bias_1 ? arguments.bias_1->as<std::byte>() : nullptr;
  params.num_rows = static_cast<std::int32_t>(handle.num_recv_rows);
  // A rank that received nothing has nothing to read; frameworks give its empty tensors no address.
  params.push = x.size(0) != 0 && !(runtime_.in_heap(x) && (!weights || runtime_.in_heap(*weights)));
  params.x = x.size(0) == 0 ? runtime_.heap()->local() : x.as<std::byte>();
  params.combined_x = result.combined_x.as<std::byte>();
  if (weights) {
    params.combined_weights = result.combined_topk_weights->as<float>();
    if (x.size(0) != 0) params.topk_weights = weights->as<float>();
  }
  params.window.rows = runtime_.window();
  plan_window(params, setup_);  // also where this rank pulls: its peers may push
  const LaunchShape shape = plan_launch(params, arguments.config, setup_);
  runtime_.executor()->kernels().combine(params, shape, scope.stream());
}

}  // namespace deep_ep
