// An executor while a CUDA graph is recorded. Needs a GPU.
#include <gtest/gtest.h>

#include "deep_ep/executor.hpp"
#include "tools/bench/gpu.hpp"

namespace deep_ep::tools {
namespace {

TEST(RecordedGraph, KeepsItsEventsFromOtherThreads) {
  if (cuda_device_count() == 0) GTEST_SKIP() << "there is no GPU";
  const std::shared_ptr<Executor> executor = make_cuda_executor(0);
  const StreamHandle recorded = executor->create_stream(), other = executor->create_stream();
  const auto record_both = [&] {
    const void* inside = executor->record_event(recorded).get();
    EXPECT_NE(executor->record_event(other).get(), inside) << "an event of the graph was recorded again";
  };
  // Two events are free, so that a new one does not lie where the graph's did.
  { const EventHandle first = executor->record_event(other), second = executor->record_event(other); }
  EXPECT_NE(record_graph(*executor, recorded, record_both), nullptr);
  executor->synchronize(other);
  executor->destroy_stream(recorded);
  executor->destroy_stream(other);
}

}  // namespace
}  // namespace deep_ep::tools
