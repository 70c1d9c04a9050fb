// combine: the sum of what the destination ranks hold for each token.
#include <algorithm>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/intranode/intranode.hpp"
#include "csrc/buffer/row_stages.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "kernels/intranode/combine_shared.hpp"

namespace deep_ep {
namespace {

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
  const LaunchPolicy& policy = setup.policy;
  const int sms = config.num_sms != 0 ? config.num_sms : Config::combine_default(setup.num_ranks).num_sms;
  const int blocks = std::min(sms, policy.multiprocessors);
  const int warps = plan_warps(params, blocks, config, setup);
  const auto shared_bytes = [&](int stages, std::uint32_t stage_bytes) {
    return CombineShared(Carver::without_memory(), setup.num_ranks, params.pushing_warps, stages, stage_bytes).bytes;
  };
  if (params.push) {  // warps that add work in registers
    const std::size_t per_warp =
        (policy.max_shared_bytes - shared_bytes(RowStages::kMost, 0)) / static_cast<std::size_t>(params.pushing_warps);
    const RowStages stages = RowStages::make(per_warp, params.row_bytes);
    params.stages = stages.count;
    params.stage_bytes = stages.bytes;
  }
  return LaunchShape{blocks, warps * 32, shared_bytes(params.stages, params.stage_bytes)};
}

}  // namespace

CombineResult Intranode::combine(const CombineArguments& arguments, const CallOptions& call) {
  check_combine(arguments, setup_);
  const ConstTensorView& x = arguments.x;
  const auto& weights = arguments.topk_weights;
  const bool pulled = pullable(runtime_, arguments);
  runtime_.faults().raise();
  const DispatchHandle& handle = *arguments.handle;
  CombineParams params{};
  params.num_tokens = static_cast<int>(handle.num_tokens);
  params.row_bytes = static_cast<std::uint32_t>(x.size(1) * 2);
  params.num_topk = static_cast<int>(num_weights(arguments));
  params.destination_row = handle.destination_row.as<std::int32_t>();
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  params.recv_src_idx = handle.recv_src_idx.as<std::int32_t>();
  params.bias[0] = arguments.bias_0 ? arguments.bias_0->as<std::byte>() : nullptr;
  params.bias[1] = arguments.bias_1 ? arguments.bias_1->as<std::byte>() : nullptr;
  params.num_rows = static_cast<std::int32_t>(handle.num_recv_rows);
  params.push = arguments.mode == CombineMode::push || !pulled;
  plan_window(params, setup_);  // also where this rank pulls: its peers may push
  const LaunchShape shape = plan_launch(params, arguments.config, setup_);

  CallScope scope(runtime_.calls(), call);
  CombineResult result = make_sums(x, params.num_tokens, num_weights(arguments), scope);
  params.combined_x = result.combined_x.as<std::byte>();
  if (weights) {
    params.combined_weights = result.combined_topk_weights->as<float>();
    if (x.size(0) != 0) params.topk_weights = weights->as<float>();
  }
  params.common = common_;
  params.wait = runtime_.faults().wait_context();
  params.x = x.size(0) == 0 ? runtime_.heap()->local() : x.as<std::byte>();
  params.window.rows = runtime_.window();
  runtime_.executor()->kernels().combine(params, shape, scope.stream());
  result.event = scope.finish();
  return result;
}

}  // namespace deep_ep
