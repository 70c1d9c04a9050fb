// What low-latency calls do on GPUs of few multiprocessors, where all blocks must be resident, and what they refuse.
#include "csrc/buffer/low_latency/plan.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "deep_ep/error.hpp"
#include "tests/cluster/low_latency_case.hpp"
#include "tests/rdma/messages.hpp"

namespace deep_ep {
namespace {

using test::message_of;
using test::says;
using test::with_hook;

void* const kSomewhere = reinterpret_cast<void*>(std::uintptr_t{4096});  // no kernel reads it

/// 8 ranks. `rdma`: that half of them are reached that way.
LowLatencySetup low_latency_setup(bool rdma = false) {
  static const RdmaQueuePair kPeers{};
  LowLatencySetup setup;
  setup.device = {Device::Kind::cuda, 0};
  setup.policy = {.multiprocessors = 132, .max_shared_bytes = std::size_t{227} << 10};
  setup.max_local_experts = 64;
  setup.common.num_ranks = 8;
  setup.common.window = LowLatencyWindow::make(0, Buffer::low_latency_bytes_hint(128, 7168, 8, 256), 8, 64);
  if (rdma) setup.common.peers = &kPeers;
  for (int far = 4; rdma && far < 8; ++far) setup.common.set_far(far);
  return setup;
}

LowLatencyDispatchArguments dispatch_of(std::int64_t tokens, const LowLatencySetup& setup) {
  LowLatencyDispatchArguments arguments;
  arguments.x = TensorView::contiguous(kSomewhere, DType::bfloat16, {tokens, 7168}, setup.device);
  arguments.topk_idx = TensorView::contiguous(kSomewhere, DType::int64, {tokens, 8}, setup.device);
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
    place_table(setup);
    arguments.handle = &handle;
    arguments.x = TensorView::contiguous(kSomewhere, DType::bfloat16, {32, 8 * 128, 7168}, setup.device);
    arguments.topk_idx = TensorView::contiguous(kSomewhere, DType::int64, {100, 8}, setup.device);
    arguments.topk_weights = TensorView::contiguous(kSomewhere, DType::float32, {100, 8}, setup.device);
  }
  LowLatencyCombineInputs(const LowLatencyCombineInputs&) = delete;
  void place_table(const LowLatencySetup& setup) {
    const std::int64_t rows = 2 + std::int64_t{handle.max_tokens} * (1 + handle.num_topk);
    handle.row_table =
        Tensor::borrow(TensorView::contiguous(kSomewhere, DType::int32, {rows, setup.common.num_ranks}, setup.device));
  }
  LowLatencyHandle handle;
  LowLatencyCombineArguments arguments;
};

/// The largest rows are those in bfloat16, with as many selections as there may be.
/// Also where rails are asked for always: a call with a hook goes directly.
TEST(LowLatencyPlan, CallsWithHooksGoDirectly) {
  LowLatencySetup setup = low_latency_setup(true);
  setup.reach.rail_width = 4;
  setup.reach.rails_always = true;
  const LowLatencyCombineInputs inputs(setup);
  const auto width = [](const auto& plan) { return static_cast<int>(plan.params.common.rail_width); };
  EXPECT_EQ(width(plan_dispatch(dispatch_of(128, setup), setup)), 4);
  EXPECT_EQ(width(plan_combine(inputs.arguments, setup)), 4);
  EXPECT_EQ(width(plan_dispatch(with_hook(dispatch_of(128, setup)), setup)), 0);
  EXPECT_EQ(width(plan_combine(with_hook(inputs.arguments), setup)), 0);
}

/// As under MPS with a quarter of the GPU, and with a single SM.
TEST(LowLatencyPlan, TheHintHasRoomForEveryRow) {
  for (const int tokens : {1, 5, 48, 128, 1000}) {
    for (const int hidden : {128, 768, 2880, 7168}) {
      for (const int ranks : {1, 2, 8, 16, 64, 128}) {
        if (ranks * tokens > 128 * 512 && hidden > 2880) continue;  // too much: see below
        const std::size_t bytes = Buffer::low_latency_bytes_hint(tokens, hidden, ranks, ranks);
        const auto window = LowLatencyWindow::make(0, bytes, ranks, BufferOptions{}.max_local_experts);
        const LowLatencyRow row{hidden, kMaxTopk, LowLatencyFormat::bf16, true};
        EXPECT_GE(window.slots, static_cast<unsigned>(tokens));
        const CombineRowFormat combined{hidden, 16};
        const auto room = [&](std::size_t bytes) { return bytes * static_cast<std::size_t>(tokens); };
        EXPECT_GE(window.source_bytes[0], room(row.bytes()))
            << tokens << " tokens of " << hidden << " channels, " << ranks << " ranks";
        EXPECT_GE(window.source_bytes[1], room(combined.bytes(true)));
        EXPECT_GE(window.source_bytes[1] * static_cast<std::size_t>(ranks), room(8 * combined.bytes(false)));
      }
    }
  }
}

/// Room for a row in each slot of each source: at some number of ranks it is more than a GPU can spare.
TEST(LowLatencyPlan, TheHintSaysHowManyTokensFit) {
  const auto hint = [](int tokens) { return Buffer::low_latency_bytes_hint(tokens, 7168, 1024, 1024); };
  EXPECT_EQ(message_of<InvalidArgument>([&] { hint(128); }),
            "max_tokens is 128, allowed: at most 77 for 1024 ranks and hidden 7168, as a rank has room for the rows of "
            "each of them: low_latency.bytes would be more than 7.00 GiB");
  EXPECT_LE(hint(77), std::size_t{7} << 30);
  EXPECT_THROW(hint(78), InvalidArgument);
}

/// On 128 nodes of 8 all blocks run side by side, those that post to a thousand ranks, too.
TEST(LowLatencyPlan, AThousandRanks) {
  LowLatencySetup setup = low_latency_setup(true);
  setup.common.num_ranks = 1024;
  setup.common.window = LowLatencyWindow::make(0, Buffer::low_latency_bytes_hint(128, 4096, 1024, 1024), 1024, 64);
  for (int far = 8; far < 1024; ++far) setup.common.set_far(far);
  LowLatencyDispatchArguments arguments = dispatch_of(128, setup);
  arguments.x = TensorView::contiguous(kSomewhere, DType::bfloat16, {128, 4096}, setup.device);
  arguments.num_experts = 1024;
  for (const auto& plan : {plan_dispatch(arguments, setup), plan_dispatch(with_hook(arguments), setup)}) {
    EXPECT_LE(plan.first.shape.blocks, 132);
    EXPECT_GE(plan.first.working_blocks, 32);
    EXPECT_EQ(plan.params.common.num_far, 1020);
  }
  arguments.max_tokens = 512;
  EXPECT_TRUE(
      says(message_of<InvalidArgument>([&] { plan_dispatch(arguments, setup); }), {"max_tokens 512", "room for"}));
}

/// And of what a program gives nevertheless no more is used than kernels can count.
TEST(LowLatencyPlan, NoMoreTokensThanKernelsCount) {
  LowLatencySetup setup = low_latency_setup();
  setup.common.num_ranks = kMaxRanks;
  setup.common.window = LowLatencyWindow::make(0, std::size_t{1} << 40, kMaxRanks, 1);
  LowLatencyCombineParams params;
  params.max_tokens = 1024;
  EXPECT_NO_THROW(choose_rails(LowLatencyKind::dispatch, false, params, {256, 256, 0}, setup));
  params.max_tokens = 1025;
  EXPECT_TRUE(says(message_of<InvalidArgument>([&] {
                     choose_rails(LowLatencyKind::dispatch, false, params, {256, 256, 0}, setup);
                   }),
                   {"max_tokens 1025", "room for 1024 tokens"}));
}

TEST(LowLatencyPlan, NoMoreBlocksThanTheContextRuns) {
  for (const int multiprocessors : {33, 3, 1}) {
    for (const bool rdma : {false, true}) {
      LowLatencySetup setup = low_latency_setup(rdma);
      setup.policy.multiprocessors = multiprocessors;
      const LowLatencyCombineInputs inputs(setup);
      if (multiprocessors == 1) {  // dispatch sends counts and rows side by side
        EXPECT_TRUE(
            says(message_of<InvalidArgument>([&] { plan_dispatch(dispatch_of(100, setup), setup); }),
                 {rdma ? "needs 3 blocks" : "needs 2 blocks", "side by side, but this process has 1 multiprocessors",
                  "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"}));
        if (rdma) {
          EXPECT_THROW(plan_combine(inputs.arguments, setup), InvalidArgument);
        } else {  // one block does all
          const auto combine = plan_combine(with_hook(inputs.arguments), setup);
          for (const LowLatencyPart& part : {combine.first, *combine.receive}) {
            EXPECT_EQ(part.shape.blocks, 1);
            EXPECT_EQ(part.working_blocks, 1);
          }
        }
        continue;
      }
      const auto dispatch = plan_dispatch(with_hook(dispatch_of(100, setup)), setup);
      const auto combine = plan_combine(with_hook(inputs.arguments), setup);
      EXPECT_EQ(combine.params.held_up(1), 0);
      for (const LowLatencyPart& part : {dispatch.first, *dispatch.receive, combine.first, *combine.receive}) {
        EXPECT_LE(part.shape.blocks, multiprocessors);
        EXPECT_GE(part.working_blocks, 1);
      }
    }
  }
}

TEST(LowLatencyPlan, OneSmIsTooFewForADispatch) {
  const LowLatencySetup setup = low_latency_setup();
  LowLatencyDispatchArguments arguments = dispatch_of(100, setup);
  arguments.num_sms = 1;
  EXPECT_EQ(plan_dispatch(arguments, setup).first.working_blocks, 2);
}

/// One more block than work, where an SM is left for it and nobody is far.
TEST(LowLatencyPlan, ABlockTellsWhereAnSmIsLeft) {
  const auto telling = [](const auto& plan) {
    return plan.first.shape.blocks - plan.first.working_blocks - plan.posters;
  };
  for (const bool rdma : {false, true}) {
    const LowLatencySetup setup = low_latency_setup(rdma);
    LowLatencyDispatchArguments dispatch = dispatch_of(3, setup);
    dispatch.max_tokens = 3;
    LowLatencyCombineInputs inputs(setup);
    inputs.handle.max_tokens = inputs.handle.num_tokens = 3;
    inputs.place_table(setup);
    inputs.arguments.x = TensorView::contiguous(kSomewhere, DType::bfloat16, {32, 8 * 3, 7168}, setup.device);
    inputs.arguments.topk_idx = TensorView::contiguous(kSomewhere, DType::int64, {3, 8}, setup.device);
    inputs.arguments.topk_weights = TensorView::contiguous(kSomewhere, DType::float32, {3, 8}, setup.device);
    EXPECT_EQ(telling(plan_dispatch(dispatch, setup)), rdma ? 0 : 1);
    EXPECT_EQ(telling(plan_combine(inputs.arguments, setup)), rdma ? 0 : 1);
    dispatch.num_sms = inputs.arguments.num_sms = 3;
    EXPECT_EQ(telling(plan_dispatch(dispatch, setup)), 0);
    EXPECT_EQ(telling(plan_combine(inputs.arguments, setup)), 0);
  }
}

/// The kernel that the send part waits for has the other multiprocessors. The receive part has all.
TEST(LowLatencyPlan, OverlapLeavesMultiprocessorsAlone) {
  LowLatencySetup setup = low_latency_setup();
  LowLatencyCombineInputs inputs(setup);
  const auto signals = TensorView::contiguous(kSomewhere, DType::int32, {32 * 16}, setup.device);
  inputs.arguments.overlap = {.signals = signals, .signal_rows = 64, .expected = 56, .num_sms = 3};
  const auto plan = plan_combine(with_hook(inputs.arguments), setup);
  EXPECT_EQ(plan.first.shape.blocks, 3);
  EXPECT_EQ(plan.params.held_up(3 * 16), (8 * 128 + 3 * 16 - 1) / (3 * 16));
  EXPECT_GT(plan.receive->shape.blocks, 100);
  EXPECT_EQ(plan.params.signals.words_of_expert, 16);
  // Too few for a word for each row that may fall to them.
  inputs.arguments.overlap->num_sms = 1;
  setup.policy.max_shared_bytes = std::size_t{4} << 10;
  EXPECT_THROW(plan_combine(with_hook(inputs.arguments), setup), InvalidArgument);
  // Room for one row of each token from each rank, but not for one of each selection.
  setup = low_latency_setup();
  setup.common.window.source_bytes[1] = std::size_t{128} * CombineRowFormat{7168, 16}.bytes(true);
  inputs.handle.num_topk = 24;
  inputs.arguments.topk_idx = TensorView::contiguous(kSomewhere, DType::int64, {100, 24}, setup.device);
  inputs.arguments.topk_weights = TensorView::contiguous(kSomewhere, DType::float32, {100, 24}, setup.device);
  inputs.place_table(setup);
  EXPECT_THROW(plan_combine(with_hook(inputs.arguments), setup), Unsupported);
}

}  // namespace
}  // namespace deep_ep
