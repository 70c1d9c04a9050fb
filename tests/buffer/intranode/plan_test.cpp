// What calls of normal mode do, worked out without an executor.
#include "csrc/buffer/intranode/plan.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "deep_ep/error.hpp"
#include "kernels/intranode/control_window.hpp"
#include "tests/support/bytes.hpp"

namespace deep_ep {
namespace {

using test::kMiB;

NormalModeSetup intranode_setup() {
  return {.num_ranks = 8,
          .max_local_experts = 64,
          .device = {Device::Kind::cuda, 0},
          .policy = {.multiprocessors = 132, .max_shared_bytes = std::size_t{227} << 10},
          .heap_bytes = 1024 * kMiB,
          .window_bytes = 256 * kMiB,
          .max_window_tokens = 8192};
}

/// Arguments without memory: a plan does not look at it.
DispatchArguments dispatch_of(std::int64_t tokens, std::int64_t hidden, const NormalModeSetup& setup) {
  const auto view = [&](DType dtype, std::initializer_list<std::int64_t> shape) {
    return TensorView::contiguous(nullptr, dtype, shape, setup.device);
  };
  DispatchArguments arguments;
  arguments.x = view(DType::bfloat16, {tokens, hidden});
  arguments.num_tokens_per_rank = view(DType::int32, {setup.num_ranks});
  arguments.is_token_in_rank = view(DType::boolean, {tokens, setup.num_ranks});
  arguments.num_tokens_per_expert = view(DType::int32, {256});
  arguments.topk_idx = view(DType::int64, {tokens, 8});
  arguments.topk_weights = view(DType::float32, {tokens, 8});
  return arguments;
}

struct CombineInputs {
  CombineInputs(std::int64_t tokens, std::int64_t rows, const NormalModeSetup& setup) {
    handle.num_tokens = tokens;
    handle.num_recv_rows = rows;
    arguments.handle = &handle;
    arguments.x = TensorView::contiguous(nullptr, DType::bfloat16, {rows, 7168}, setup.device);
  }
  CombineInputs(const CombineInputs&) = delete;
  DispatchHandle handle;
  CombineArguments arguments;
};

TEST(IntranodePlan, BlocksOfDispatch) {
  const NormalModeSetup setup = intranode_setup();
  DispatchArguments arguments = dispatch_of(4096, 7168, setup);
  const auto blocks = [&] { return plan_dispatch(arguments, setup).shape.blocks; };
  EXPECT_EQ(blocks(), Config::dispatch_default(8).num_sms);
  arguments.config.num_sms = 24;
  EXPECT_EQ(blocks(), 24);
  arguments.config.num_sms = 4000;
  EXPECT_EQ(blocks(), 132) << "as many as there are";
  arguments = dispatch_of(9, 7168, setup);
  EXPECT_EQ(blocks(), 2) << "eight warps a block, and no warp without a token";
  arguments = dispatch_of(0, 7168, setup);
  EXPECT_EQ(blocks(), 1) << "the peers wait for this rank";
}

TEST(IntranodePlan, StagesFitSharedMemory) {
  const NormalModeSetup setup = intranode_setup();
  for (const std::int64_t hidden : {8, 512, 7168, 1 << 20}) {
    SCOPED_TRACE(hidden);
    const DispatchPlan plan = plan_dispatch(dispatch_of(64, hidden, setup), setup);
    EXPECT_LE(plan.shape.shared_bytes, setup.policy.max_shared_bytes);
    EXPECT_GE(plan.params.stages, 2);
    EXPECT_LE(plan.params.stages, 8);
    EXPECT_EQ(plan.params.stage_bytes % kLine, 0u);
    EXPECT_EQ(plan.params.rows.row_bytes, 2 * hidden);
    EXPECT_EQ(plan.params.stage_bytes >= plan.params.rows.row_bytes, hidden <= 7168) << "long rows travel in pieces";
  }
}

TEST(IntranodePlan, ACachedDispatchSendsRowsOnly) {
  const NormalModeSetup setup = intranode_setup();
  DispatchHandle handle;
  handle.num_experts = 256;
  DispatchArguments arguments = dispatch_of(64, 512, setup);
  arguments.num_worst_tokens = 100;
  const DispatchParams fresh = plan_dispatch(arguments, setup).params;
  EXPECT_TRUE(fresh.send_src_idx && fresh.fill_tail && fresh.rows.topk_idx_is_64_bit);
  EXPECT_EQ(fresh.rows.num_topk, 8);
  EXPECT_EQ(fresh.num_local_experts, 32);
  const DispatchParams cached =
      plan_dispatch(CachedDispatchArguments{.x = arguments.x, .x_scales = {}, .handle = &handle}, setup).params;
  EXPECT_FALSE(cached.send_src_idx || cached.fill_tail);
  EXPECT_EQ(cached.rows.num_topk, 0);
  EXPECT_EQ(cached.num_local_experts, 32);
}

TEST(IntranodePlan, RanksCompareWhatTheySend) {
  const NormalModeSetup setup = intranode_setup();
  DispatchArguments arguments = dispatch_of(64, 512, setup);
  arguments.x_scales = TensorView::contiguous(nullptr, DType::float32, {64, 4}, setup.device);
  const CallShape shape = plan_notify(arguments, setup).params.shape;
  const std::array<std::int64_t, 7> expected = {
      1024, 16, 8, 8, 256, static_cast<std::int64_t>(DType::bfloat16), static_cast<std::int64_t>(DType::float32)};
  for (std::size_t i = 0; i < expected.size(); ++i) EXPECT_EQ(shape.word[i], expected[i]) << "word " << i;
}

TEST(IntranodePlan, PartsOfTheWindowDoNotOverlap) {
  NormalModeSetup setup = intranode_setup();
  setup.window_bytes = 100000;
  DispatchArguments arguments = dispatch_of(64, 512, setup);
  arguments.x_scales = TensorView::contiguous(nullptr, DType::float32, {64, 4}, setup.device);
  DispatchParams params = plan_dispatch(arguments, setup).params;
  params.output_rows = 500;
  std::byte* const window = reinterpret_cast<std::byte*>(std::uintptr_t{1} << 40);
  plan_window(params, window, setup);
  EXPECT_GT(params.window_rows, 0u);
  const std::size_t rows = std::size_t{8} * params.window_rows;
  const std::byte* const parts[] = {params.window.x,
                                    reinterpret_cast<const std::byte*>(params.window.scales),
                                    params.window.topk_idx,
                                    reinterpret_cast<const std::byte*>(params.window.topk_weights),
                                    reinterpret_cast<const std::byte*>(params.window.src_idx),
                                    window + 100000};
  const std::size_t row_bytes[] = {1024, 16, 64, 32, 4};
  EXPECT_EQ(parts[0], window);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ((parts[i] - window) % kLine, 0u) << "part " << i;
    EXPECT_GE(parts[i + 1], parts[i] + rows * row_bytes[i]) << "part " << i;
  }
  setup.window_bytes = 9000;
  EXPECT_THROW(plan_window(params, window, setup), OutOfMemory) << "eight rows and their line each do not fit";
}

TEST(IntranodePlan, CombinePushesWhatPeersCannotRead) {
  const NormalModeSetup setup = intranode_setup();
  CombineInputs inputs(4096, 5000, setup);
  const CombinePlan pull = plan_combine(inputs.arguments, true, setup);
  EXPECT_FALSE(pull.params.push);
  EXPECT_EQ(pull.params.pushing_warps, 0);
  EXPECT_EQ(pull.shape.threads, 32 * pull.params.adding_warps);
  EXPECT_EQ(pull.shape.blocks, Config::combine_default(8).num_sms);
  const CombinePlan push = plan_combine(inputs.arguments, false, setup);
  EXPECT_TRUE(push.params.push);
  EXPECT_EQ(push.shape.threads, 32 * (push.params.adding_warps + push.params.pushing_warps + 1)) << "one raises flags";
  EXPECT_LE(push.shape.shared_bytes, setup.policy.max_shared_bytes);
  inputs.arguments.mode = CombineMode::push;
  EXPECT_TRUE(plan_combine(inputs.arguments, true, setup).params.push);
}

TEST(IntranodePlan, FewBlocksPushWithMoreWarpsEach) {
  const NormalModeSetup setup = intranode_setup();
  CombineInputs inputs(4096, 5000, setup);
  for (const int sms : {1, 4, 8, 11, 16, 24, 132}) {
    inputs.arguments.config.num_sms = sms;
    const CombinePlan plan = plan_combine(inputs.arguments, false, setup);
    const CombineParams& params = plan.params;
    EXPECT_GE(params.pushing_warps, 2) << sms;
    EXPECT_GE(params.adding_warps, 2 * params.pushing_warps) << sms;
    EXPECT_EQ(plan.shape.threads, 512) << sms;
    EXPECT_LE(plan.shape.shared_bytes, setup.policy.max_shared_bytes) << sms;
    const int pushing = params.pushing_warps * std::min(params.pushing_blocks, plan.shape.blocks);
    EXPECT_LE(pushing, 32) << sms;
    EXPECT_GE(pushing, std::min(4 * sms, 30)) << sms;
  }
}

TEST(IntranodePlan, TokensAreCutWhereWarpsGetFew) {
  const NormalModeSetup setup = intranode_setup();
  const auto parts = [&](std::int64_t tokens, int sms) {
    CombineInputs inputs(tokens, 5000, setup);
    inputs.arguments.config.num_sms = sms;
    return plan_combine(inputs.arguments, true, setup).params.parts_per_token;
  };
  EXPECT_EQ(parts(0, 8), 4);
  EXPECT_EQ(parts(128, 8), 4);
  EXPECT_EQ(parts(4096, 8), 1);
  EXPECT_EQ(parts(4096, 16), 2);
  EXPECT_EQ(parts(4096, 24), 2);
  EXPECT_EQ(parts(4096, 64), 4);
}

TEST(IntranodePlan, RoundsOfCombine) {
  NormalModeSetup setup = intranode_setup();
  CombineInputs inputs(1000, 5000, setup);
  const CombineParams whole = plan_combine(inputs.arguments, true, setup).params;
  EXPECT_EQ(whole.window.tokens, 1000) << "also where this rank pulls, as its peers may push";
  EXPECT_EQ(whole.window.tokens_per_round, 1000);
  setup.window_bytes = 50 * 8 * std::size_t{whole.window.stride};
  const CombineParams rounds = plan_combine(inputs.arguments, true, setup).params;
  EXPECT_EQ(rounds.window.tokens_per_round, 50 / kWindowRounds);
  EXPECT_EQ(rounds.window.tokens, kWindowRounds * rounds.window.tokens_per_round);
  setup.window_bytes = (kWindowRounds - 1) * 8 * std::size_t{whole.window.stride};
  EXPECT_THROW(plan_combine(inputs.arguments, true, setup), OutOfMemory);
}

}  // namespace
}  // namespace deep_ep
