// What low-latency calls do, worked out without an executor.
#include "csrc/buffer/low_latency/plan.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>

#include "csrc/buffer/low_latency/rank_masks.hpp"
#include "deep_ep/error.hpp"
#include "kernels/low_latency/combine/shared.hpp"
#include "kernels/low_latency/combine/wire.hpp"
#include "tests/cluster/low_latency_case.hpp"

namespace deep_ep {
namespace {

using test::with_hook;

/// 8 ranks. `rdma`: that half of them are reached that way.
LowLatencySetup low_latency_setup(bool rdma = false) {
  static const RdmaPeerParams kPeers{};
  LowLatencySetup setup;
  setup.device = {Device::Kind::cuda, 0};
  setup.policy = {.multiprocessors = 132, .max_shared_bytes = std::size_t{227} << 10};
  setup.max_local_experts = 64;
  setup.low_latency_bytes = Buffer::low_latency_bytes_hint(128, 7168, 8, 256);
  setup.common.num_ranks = 8;
  setup.common.window = LowLatencyWindow::make(0, setup.low_latency_bytes, 8, 64);
  if (rdma) setup.common.peers = &kPeers;
  for (int far = 4; rdma && far < 8; ++far) setup.common.set_far(far);
  return setup;
}

LowLatencyDispatchArguments dispatch_of(std::int64_t tokens, const LowLatencySetup& setup) {
  LowLatencyDispatchArguments arguments;
  arguments.x = TensorView::contiguous(nullptr, DType::bfloat16, {tokens, 7168}, setup.device);
  arguments.topk_idx = TensorView::contiguous(nullptr, DType::int64, {tokens, 8}, setup.device);
  arguments.max_tokens = 128;
  arguments.num_experts = 256;
  return arguments;
}

struct LowLatencyCombineInputs {
  explicit LowLatencyCombineInputs(const LowLatencySetup& setup) {
    handle.num_tokens = 100;
    handle.max_tokens = 128;
    handle.num_topk = 8;
    handle.num_experts = 256;
    arguments.handle = &handle;
    arguments.x = TensorView::contiguous(nullptr, DType::bfloat16, {32, 8 * 128, 7168}, setup.device);
    arguments.topk_idx = TensorView::contiguous(nullptr, DType::int64, {100, 8}, setup.device);
    arguments.topk_weights = TensorView::contiguous(nullptr, DType::float32, {100, 8}, setup.device);
  }
  LowLatencyCombineInputs(const LowLatencyCombineInputs&) = delete;
  LowLatencyHandle handle;
  LowLatencyCombineArguments arguments;
};

TEST(LowLatencyPlan, OneKernelOrTwo) {
  const LowLatencySetup setup = low_latency_setup();
  const auto at_once = plan_dispatch(dispatch_of(100, setup), setup);
  EXPECT_EQ(at_once.first.phase, LowLatencyPhase::both);
  EXPECT_FALSE(at_once.receive);
  const auto hooked = plan_dispatch(with_hook(dispatch_of(100, setup)), setup);
  EXPECT_EQ(hooked.first.phase, LowLatencyPhase::send);
  ASSERT_TRUE(hooked.receive);
  EXPECT_EQ(hooked.receive->phase, LowLatencyPhase::receive);
  EXPECT_EQ(hooked.first.working_blocks, 101) << "a block for each token, and the clerk";
  EXPECT_EQ(hooked.receive->working_blocks, 132) << "more rows may come than there are SMs";
  EXPECT_LT(hooked.receive->shape.shared_bytes, hooked.first.shape.shared_bytes) << "no row is staged";
}

TEST(LowLatencyPlan, PostersAreBlocksOfTheirOwn) {
  const auto near = plan_dispatch(dispatch_of(100, low_latency_setup()), low_latency_setup());
  EXPECT_EQ(near.first.shape.blocks, near.first.working_blocks);
  const LowLatencySetup setup = low_latency_setup(true);
  const auto far = plan_dispatch(dispatch_of(100, setup), setup);
  const int warps = far.first.shape.threads / 32;
  EXPECT_EQ(far.first.shape.blocks, far.first.working_blocks + (4 + warps - 1) / warps);
  EXPECT_LE(far.first.shape.blocks, setup.policy.multiprocessors);
  // A warp for each lane to a far rank, and none for near ones.
  LowLatencySetup with_lanes = low_latency_setup(true);
  with_lanes.common.lanes = 4;
  LowLatencyDispatchArguments narrow = dispatch_of(100, with_lanes);
  narrow.config.warps_per_block = 1;
  const auto posters = [&](const LowLatencySetup& chosen) {
    const LowLatencyPart part = plan_dispatch(narrow, chosen).first;
    return part.shape.blocks - part.working_blocks;
  };
  EXPECT_EQ(posters(setup), 4);
  EXPECT_EQ(posters(with_lanes), 16);
}

/// With hooks, combine has a block for each row and selection that may come, as far as there are SMs, two for each
/// token that is added up where there are as many, and one that waits until all ranks have sent.
TEST(LowLatencyPlan, BlocksOfCombineWithHooks) {
  const LowLatencySetup setup = low_latency_setup();
  LowLatencyCombineInputs inputs(setup);
  const auto plan_of = [&](int tokens, int sms) {
    inputs.handle.num_tokens = tokens;
    inputs.arguments.topk_idx = TensorView::contiguous(nullptr, DType::int64, {tokens, 8}, setup.device);
    inputs.arguments.config.num_sms = sms;
    return plan_combine(with_hook(inputs.arguments), setup);
  };
  const auto few = plan_of(1, 0);
  EXPECT_EQ(few.receive->working_blocks, 2);
  EXPECT_EQ(few.receive->shape.blocks, 3);
  const auto many = plan_of(100, 0);
  EXPECT_EQ(many.first.working_blocks, 132);
  EXPECT_EQ(many.first.shape.blocks, 132);
  EXPECT_EQ(many.receive->working_blocks, 100);
  EXPECT_EQ(many.receive->shape.blocks, 101);
  EXPECT_EQ(plan_of(100, 1).receive->shape.blocks, 1) << "no more blocks than the caller allows";
}

/// Rows that fit shared memory as they are fit it on their way into FP8, too.
TEST(LowLatencyPlan, RowsInFp8TakeNoMoreSharedMemory) {
  constexpr int kWidth = 15 * 4 * 896;  // whole passes, and whole lines of bfloat16, for each of four warps
  const auto bytes = [](bool fp8) {
    using device::low_latency::CombineShared;
    return CombineShared(Carver::without_memory(), {kWidth, fp8}, 8, 2, 4, 1, 0).bytes;
  };
  EXPECT_EQ(bytes(true), bytes(false));
}

TEST(LowLatencyPlan, KernelsByWhatTheCallNeeds) {
  EXPECT_EQ(plan_dispatch(dispatch_of(1, low_latency_setup()), low_latency_setup()).kernel,
            &KernelTable::dispatch_low_latency);
  EXPECT_EQ(plan_dispatch(dispatch_of(1, low_latency_setup()), low_latency_setup(true)).kernel,
            &KernelTable::dispatch_low_latency_rdma);
  for (const bool rdma : {false, true}) {
    const int most =
        rdma ? kernels::dispatch_low_latency_rdma::kMaxThreads : kernels::dispatch_low_latency::kMaxThreads;
    EXPECT_EQ(plan_dispatch(dispatch_of(1, low_latency_setup()), low_latency_setup(rdma)).first.shape.threads, most);
  }
  LowLatencyCombineInputs inputs(low_latency_setup());
  const auto combine = [&](bool rdma) { return plan_combine(inputs.arguments, low_latency_setup(rdma)).kernel; };
  EXPECT_EQ(plan_combine(with_hook(inputs.arguments), low_latency_setup()).kernel,
            &KernelTable::combine_low_latency_unreduced);
  EXPECT_EQ(plan_combine(with_hook(inputs.arguments), low_latency_setup(true)).kernel,
            &KernelTable::combine_low_latency_rdma)
      << "far ranks get sums";
  LowLatencyCombineInputs many(low_latency_setup());
  many.handle.num_topk = 16;
  many.arguments.topk_idx = TensorView::contiguous(nullptr, DType::int64, {100, 16}, low_latency_setup().device);
  many.arguments.topk_weights = TensorView::contiguous(nullptr, DType::float32, {100, 16}, low_latency_setup().device);
  EXPECT_EQ(plan_combine(with_hook(many.arguments), low_latency_setup()).kernel, &KernelTable::combine_low_latency)
      << "the hint has room for 8 rows a token";
  EXPECT_EQ(combine(false), &KernelTable::combine_low_latency);
  EXPECT_EQ(combine(true), &KernelTable::combine_low_latency_rdma);

  inputs.arguments.use_fp8 = true;
  EXPECT_EQ(combine(false), &KernelTable::combine_low_latency_fp8);
  EXPECT_EQ(combine(true), &KernelTable::combine_low_latency_rdma_fp8);
  EXPECT_EQ(plan_combine(with_hook(inputs.arguments), low_latency_setup()).kernel,
            &KernelTable::combine_low_latency_unreduced_fp8);
  EXPECT_EQ(plan_combine(with_hook(inputs.arguments), low_latency_setup(true)).kernel,
            &KernelTable::combine_low_latency_rdma_fp8);

  // Masks: one more block watches.
  std::int32_t mask = 0;
  for (const bool rdma : {false, true}) {
    LowLatencySetup masking = low_latency_setup(rdma);
    masking.common.mask = &mask;
    EXPECT_TRUE(masking.watched());
    const auto dispatch = plan_dispatch(dispatch_of(1, masking), masking);
    EXPECT_EQ(dispatch.kernel,
              rdma ? &KernelTable::dispatch_low_latency_rdma_watched : &KernelTable::dispatch_low_latency_watched);
    for (const bool fp8 : {false, true}) {
      inputs.arguments.use_fp8 = fp8;
      const auto plan = plan_combine(inputs.arguments, masking);
      if (rdma) {
        EXPECT_EQ(plan.kernel, fp8 ? &KernelTable::combine_low_latency_rdma_watched_fp8
                                   : &KernelTable::combine_low_latency_rdma_watched);
        EXPECT_LE(plan.first.shape.blocks, masking.policy.multiprocessors) << "all are resident";
        continue;
      }
      EXPECT_EQ(plan.kernel,
                fp8 ? &KernelTable::combine_low_latency_watched_fp8 : &KernelTable::combine_low_latency_watched);
      LowLatencySetup apart = masking;
      apart.own_masks = true;
      EXPECT_EQ(plan_combine(inputs.arguments, apart).kernel,
                fp8 ? &KernelTable::combine_low_latency_fp8 : &KernelTable::combine_low_latency);
      EXPECT_EQ(plan.first.shape.blocks, plan.first.working_blocks + 1);
      EXPECT_LE(plan.first.shape.blocks, masking.policy.multiprocessors) << "all are resident";
    }
  }
}

TEST(LowLatencyPlan, RanksAgreeOnMasksOnOneHostWithAtomicsOnly) {
  std::vector<MaskingRank> ranks(3);
  for (MaskingRank& rank : ranks) rank = {.process = this_process(), .reaches_board = true};
  EXPECT_EQ(why_own_masks(ranks), "");
  ranks[2].reaches_board = false;
  EXPECT_EQ(why_own_masks(ranks), "rank 2 is not known to have native atomics on the GPU of rank 0");
  ranks[1].process.boot_id[0] ^= 1;
  EXPECT_EQ(why_own_masks(ranks), "rank 1 is on another host than rank 0, and a host may be lost");
}

TEST(LowLatencyPlan, CombineSharesRowsOut) {
  const LowLatencySetup setup = low_latency_setup();
  const LowLatencyCombineInputs inputs(setup);
  const auto at_once = plan_combine(inputs.arguments, setup);
  const int groups = at_once.first.working_blocks * (at_once.params.block_warps / int{at_once.params.warps_per_row});
  EXPECT_GE(at_once.first.rows_of_group * groups, 8 * 128) << "every row has a group";
  EXPECT_LT((at_once.first.rows_of_group - 1) * groups, 8 * 128);
  EXPECT_LE(at_once.first.shape.shared_bytes, setup.policy.max_shared_bytes);
  const auto hooked = plan_combine(with_hook(inputs.arguments), setup);
  EXPECT_EQ(hooked.first.rows_of_group, at_once.first.rows_of_group);
  ASSERT_TRUE(hooked.receive);
  EXPECT_EQ(hooked.receive->rows_of_group, 0) << "nothing is sent";
  EXPECT_EQ(hooked.receive->working_blocks, 100) << "a block for each token";
}

TEST(LowLatencyPlan, ResultsOfEachLayout) {
  const LowLatencySetup setup = low_latency_setup();
  LowLatencyDispatchArguments arguments = dispatch_of(100, setup);
  const auto describe = [](const std::vector<TensorView>& views) {
    std::string text;
    for (const TensorView& view : views) text += view.describe() + " ";
    return text;
  };
  auto plan = plan_dispatch(arguments, setup);
  EXPECT_EQ(describe(plan.rows), "float8_e4m3[32, 1024, 7168] float32[32, 56, 1024] ");
  EXPECT_EQ(describe(plan.others), "int32[32] ");
  EXPECT_EQ(describe(plan.kept), "int32[32, 1024] int64[32, 8] int32[1154, 8] ");
  arguments.round_scale = arguments.use_ue8m0 = true;
  plan = plan_dispatch(arguments, setup);
  EXPECT_EQ(describe(plan.rows), "float8_e4m3[32, 1024, 7168] int32[32, 14, 1024] ");
  arguments.use_fp8 = false;
  arguments.layout = LowLatencyLayout::rank_major;
  arguments.topk_weights = TensorView::contiguous(nullptr, DType::float32, {100, 8}, setup.device);
  plan = plan_dispatch(arguments, setup);
  EXPECT_EQ(describe(plan.rows), "bfloat16[8, 128, 7168] ");
  EXPECT_EQ(describe(plan.others), "int32[8] int32[8, 128, 8] float32[8, 128, 8] ");
  EXPECT_EQ(describe(plan.kept), "int32[8, 128] int64[8] int32[1154, 8] ");
}

TEST(LowLatencyPlan, RanksCompareWhatMustBeEqual) {
  const LowLatencySetup setup = low_latency_setup();
  std::set<std::uint32_t> shapes;
  LowLatencyDispatchArguments arguments = dispatch_of(100, setup);
  const auto add = [&] { return shapes.insert(plan_dispatch(arguments, setup).params.call_shape).second; };
  EXPECT_TRUE(add());
  arguments = dispatch_of(7, setup);
  EXPECT_FALSE(add()) << "ranks may have different numbers of tokens";
  arguments.max_tokens = 127;
  EXPECT_TRUE(add());
  arguments.num_experts = 128;
  EXPECT_TRUE(add());
  arguments.use_fp8 = false;
  EXPECT_TRUE(add());
  arguments.topk_weights = TensorView::contiguous(nullptr, DType::float32, {7, 8}, setup.device);
  EXPECT_TRUE(add());
}

TEST(LowLatencyPlan, RailsWhereThereAreSomeAndTheyPay) {
  LowLatencySetup setup = low_latency_setup(true);
  const auto width = [&](bool hook = false) {
    const auto arguments = dispatch_of(100, setup);
    return plan_dispatch(hook ? with_hook(arguments) : arguments, setup).params.common.rail_width;
  };
  EXPECT_EQ(width(), 0) << "there are none";
  setup.rail_width = 4;
  EXPECT_EQ(width(), 4) << "128 tokens a rank are many";
  EXPECT_EQ(width(true), 0) << "with hooks only where it is asked for";
  LowLatencyDispatchArguments few = dispatch_of(1, setup);
  few.max_tokens = 1;
  EXPECT_EQ(plan_dispatch(few, setup).params.common.rail_width, 0);
  setup.rails_always = true;
  EXPECT_EQ(plan_dispatch(few, setup).params.common.rail_width, 4);
  EXPECT_EQ(width(true), 4);
}

TEST(LowLatencyPlan, RelaysFindMultiprocessors) {
  LowLatencySetup setup = low_latency_setup(true);
  const LowLatencyCombineInputs inputs(setup);
  const auto blocks = [](const auto& plan) { return plan.first.shape.blocks; };
  const auto hooked = [&](int tokens) {
    LowLatencyDispatchArguments arguments = with_hook(dispatch_of(tokens, setup));
    arguments.max_tokens = tokens;
    return plan_dispatch(arguments, setup);
  };
  EXPECT_FALSE(hooked(100).relay) << "there are no rails";
  EXPECT_EQ(hooked(128).receive->shape.blocks, 132);
  setup.rail_width = 4;
  EXPECT_EQ(hooked(128).receive->shape.blocks, 132) << "with hooks no call goes by rails";
  setup.rails_always = true;
  EXPECT_FALSE(plan_dispatch(dispatch_of(100, setup), setup).relay) << "a call in one launch hands on by itself";
  ASSERT_TRUE(hooked(1).relay && hooked(128).relay);
  EXPECT_EQ(hooked(1).relay->shape.blocks, 1);
  EXPECT_EQ(hooked(128).relay->shape.blocks, 4);
  EXPECT_EQ(hooked(128).relay->shape.threads % (32 * hooked(128).relay->warps_per_row), 0);
  // What may wait for other ranks leaves room for it, where it may run.
  EXPECT_EQ(hooked(128).first.shape.blocks, 130) << "a send part waits for nobody who waits for a relay";
  EXPECT_EQ(hooked(128).receive->shape.blocks, 124) << "one of each kind may run";
  EXPECT_EQ(blocks(plan_dispatch(dispatch_of(128, setup), setup)), 132);
  EXPECT_EQ(blocks(plan_dispatch(dispatch_of(128, setup), setup, true)), 124);
  const auto combine = [&](bool beside) { return plan_combine(inputs.arguments, setup, beside); };
  EXPECT_EQ(blocks(combine(false)), 132);
  EXPECT_EQ(blocks(combine(true)), 124);
  // A caller who allows few blocks leaves enough to it: they are not taken from these.
  const auto received_by = [&](int sms) {
    LowLatencyDispatchArguments arguments = with_hook(dispatch_of(128, setup));
    arguments.config.num_sms = sms;
    return plan_dispatch(arguments, setup).receive->shape.blocks;
  };
  EXPECT_EQ(received_by(20), 20);
  EXPECT_EQ(received_by(130), 124);
  LowLatencyCombineArguments few_blocks = inputs.arguments;
  few_blocks.config.num_sms = 20;
  EXPECT_EQ(blocks(plan_combine(few_blocks, setup, true)), 20);
  setup.rail_width = 0;
  EXPECT_EQ(blocks(combine(true)), 132);
}

TEST(LowLatencyPlan, RelaysOfCombineAddAndPost) {
  LowLatencySetup setup = low_latency_setup(true);
  const LowLatencyCombineInputs inputs(setup);
  const LowLatencyCombineArguments hooked = with_hook(inputs.arguments);
  setup.rail_width = 4;
  EXPECT_FALSE(plan_combine(hooked, setup).relay) << "with hooks no call goes by rails";
  setup.rails_always = true;
  const LowLatencyCombinePlan at_once = plan_combine(inputs.arguments, setup);
  EXPECT_FALSE(at_once.relay) << "a call in one launch adds up by itself";
  const LowLatencyCombinePlan plan = plan_combine(hooked, setup);
  EXPECT_EQ(plan.kernel, &KernelTable::combine_low_latency_rails);
  EXPECT_EQ(plan.params.call_shape, at_once.params.call_shape) << "ranks may differ in whether they have a hook";
  ASSERT_TRUE(plan.relay && plan.receive);
  EXPECT_EQ(plan.relay->kernel, &KernelTable::relay_low_latency_sums);
  EXPECT_EQ(plan.relay->shape.blocks, 4);
  EXPECT_EQ(plan.relay->shape.threads, kernels::relay_low_latency_sums::kMaxThreads);
  EXPECT_EQ(plan.relay->warps_per_row, kernels::relay_low_latency_sums::kMaxThreads / 32 - 1) << "one warp posts";
  EXPECT_LE(plan.first.shape.blocks, 132);
  EXPECT_LE(plan.receive->shape.blocks, 124);
  setup.rail_width = 1;  // seven rails, of which four blocks serve two each
  EXPECT_EQ(plan_combine(hooked, setup).relay->warps_per_row, kernels::relay_low_latency_sums::kMaxThreads / 32 - 2);
  setup.common.lanes = 4;  // no more than four warps of a block post, in turn
  EXPECT_EQ(plan_combine(hooked, setup).relay->warps_per_row, kernels::relay_low_latency_sums::kMaxThreads / 32 - 4);
  LowLatencyCombineArguments fp8 = hooked;
  fp8.use_fp8 = true;
  EXPECT_FALSE(plan_combine(fp8, setup).relay) << "FP8 goes directly";
}

TEST(LowLatencyPlan, RowsInFp8AreShorter) {
  using device::low_latency::CombineWire;
  EXPECT_EQ((CombineWire{7168, true}.bytes()), 8192u);
  EXPECT_EQ((CombineWire{7168, false}.bytes()), 15360u);
  for (int hidden = 128; hidden <= 16384; hidden += 128) {
    ASSERT_LT((CombineWire{hidden, true}.bytes()), (CombineWire{hidden, false}.bytes()))
        << "rows fit wherever those of bfloat16 do: " << hidden;
  }
}

TEST(LowLatencyPlan, WhatDoesNotFitIsRefused) {
  LowLatencySetup setup = low_latency_setup();
  LowLatencyDispatchArguments arguments = dispatch_of(100, setup);
  arguments.max_tokens = 4000;
  EXPECT_THROW(plan_dispatch(arguments, setup), InvalidArgument);
  setup.policy.max_shared_bytes = 8192;
  EXPECT_THROW(plan_dispatch(dispatch_of(100, setup), setup), InvalidArgument) << "a row is staged in shared memory";
  EXPECT_THROW(plan_dispatch(with_hook(dispatch_of(100, setup)), setup), InvalidArgument);
}

TEST(LowLatencyPlan, HowManyTokensFollowsFromTopk) {
  const LowLatencySetup setup = low_latency_setup();
  LowLatencyDispatchArguments arguments = dispatch_of(100, setup);
  const std::int64_t topk = arguments.topk_idx.size(1);
  arguments.x.data = arguments.topk_idx.data = reinterpret_cast<const void*>(std::uintptr_t{4096});  // nobody reads it
  arguments.max_tokens = static_cast<int>(65535 / topk) + 1;
  try {
    check_dispatch(arguments, setup);
    FAIL() << "more tokens than counts can say";
  } catch (const InvalidArgument& error) {
    EXPECT_EQ(error.what(), "max_tokens is " + std::to_string(arguments.max_tokens) + ", allowed: 1 to " +
                                std::to_string(65535 / topk) + ", as max_tokens times top-k, which is " +
                                std::to_string(topk) + ", is at most 65535");
  }
}

TEST(LowLatencyPlan, NoMoreBlocksThanTheContextRuns) {
  // As under MPS with a quarter of the GPU, and with a single SM.
  for (const int multiprocessors : {33, 3, 1}) {
    for (const bool rdma : {false, true}) {
      LowLatencySetup setup = low_latency_setup(rdma);
      setup.policy.multiprocessors = multiprocessors;
      const LowLatencyCombineInputs inputs(setup);
      if (rdma && multiprocessors == 1) {
        EXPECT_THROW(plan_dispatch(dispatch_of(100, setup), setup), InvalidArgument);
        EXPECT_THROW(plan_combine(inputs.arguments, setup), InvalidArgument);
        continue;
      }
      const auto dispatch = plan_dispatch(with_hook(dispatch_of(100, setup)), setup);
      const auto combine = plan_combine(with_hook(inputs.arguments), setup);
      for (const LowLatencyPart& part : {dispatch.first, *dispatch.receive, combine.first, *combine.receive}) {
        EXPECT_LE(part.shape.blocks, multiprocessors);
        EXPECT_GE(part.working_blocks, 1);
      }
    }
  }
  LowLatencySetup setup = low_latency_setup(true);
  setup.policy.multiprocessors = 1;
  try {
    plan_dispatch(dispatch_of(100, setup), setup);
    FAIL() << "a block that posts and one that works do not fit";
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("needs 2 blocks side by side, but this process has 1 multiprocessors"), std::string::npos)
        << text;
    EXPECT_NE(text.find("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"), std::string::npos) << text;
  }
  LowLatencySetup watched = low_latency_setup();
  std::int32_t mask = 0;
  watched.common.mask = &mask;
  watched.policy.multiprocessors = 1;
  try {
    plan_dispatch(dispatch_of(100, watched), watched);
    FAIL() << "a block that watches and one that works do not fit";
  } catch (const InvalidArgument& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("masking needs 2 blocks side by side, of which one watches"), std::string::npos) << text;
  }
}

}  // namespace
}  // namespace deep_ep
