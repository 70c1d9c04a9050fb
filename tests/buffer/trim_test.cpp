// What a buffer keeps of earlier results goes back when the program asks for it.
#include <gtest/gtest.h>

#include "csrc/memory/storage.hpp"
#include "deep_ep/bootstrap.hpp"
#include "tests/cluster/case.hpp"
#include "tests/cluster/exchange.hpp"
#include "tests/cluster/recording_executor.hpp"

namespace deep_ep::test {
namespace {

class TrimTest : public ::testing::Test {
 protected:
  TrimTest() {
    BufferOptions options;
    options.heap_bytes = std::size_t{16} << 20;
    buffer_ = &rank_.buffer(options);
  }
  DispatchLayout layout() {
    return buffer_->get_dispatch_layout(inputs_.topk_idx, case_.shape.experts(), rank_.call());
  }

  std::shared_ptr<Bootstrap> bootstrap_ = make_thread_bootstraps(1).front();
  std::shared_ptr<RecordingExecutor> executor_ = std::make_shared<RecordingExecutor>(make_host_executor());
  Rank rank_{0, {.ranks = 1, .where = {}, .host = {}}, bootstrap_, executor_};
  Case case_ = make_case({.tokens = {9}, .hidden = 64, .combine_hidden = 64});
  Inputs inputs_ = upload_inputs(rank_, case_);
  Buffer* buffer_ = nullptr;
};

TEST_F(TrimTest, GivesBackWhatNobodyHolds) {
  if (!MemoryCache::kReuses) GTEST_SKIP() << "nothing is kept under AddressSanitizer";
  const DispatchLayout held = layout();
  const auto counts = rank_.download_bytes(held.num_tokens_per_expert.view());
  layout();  // dropped at once
  executor_->calls = {};
  EXPECT_EQ(buffer_->trim(), 0u) << "the host executor keeps nothing that a driver could have";
  EXPECT_GT(executor_->calls.free_async, 0);
  executor_->calls = {};
  buffer_->trim();
  EXPECT_EQ(executor_->calls.free_async, 0) << "it has given back everything";
  EXPECT_EQ(rank_.download_bytes(held.num_tokens_per_expert.view()), counts);
  layout();
  EXPECT_GT(executor_->calls.allocate_async, 0);
  run_round(rank_, *buffer_, case_);
}

TEST_F(TrimTest, IsRefusedWhileCallsAreRecorded) {
  executor_->recording = true;
  try {
    buffer_->trim();
    ADD_FAILURE() << "it would wait for work that a graph does later";
  } catch (const InvalidArgument& error) {
    EXPECT_NE(std::string(error.what()).find("CUDA graph"), std::string::npos) << error.what();
  }
  executor_->recording = false;
  buffer_->trim();
}

}  // namespace
}  // namespace deep_ep::test
