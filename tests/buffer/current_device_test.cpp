// Calls of a buffer leave the calling thread's device as it was; threads of the library leave it its signals.
#include <filesystem>
#include <fstream>
#include <set>
#include <string>

#include "csrc/buffer/checks.hpp"
#include "tests/cluster/counting_executor.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"

namespace deep_ep::test {
namespace {

const std::set<std::string> kNames = {"deep_ep_control", "deep_ep_cpu"};

/// A device that is never current by itself.
class EnteredExecutor final : public CountingExecutor {
 public:
  using CountingExecutor::CountingExecutor;
  int entered = 0, depth = 0, kept = 0;

  bool enter() override { return CountingExecutor::make_current(), ++entered, ++depth, true; }
  void leave() noexcept override { --depth; }
  void make_current() override { CountingExecutor::make_current(), ++kept; }
};

class CurrentDeviceTest : public ClusterTest {};
DEEP_EP_ON_THREADS(CurrentDeviceTest);

TEST_P(CurrentDeviceTest, IsAsBeforeTheCall) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "the executor plays the device";
  const LowLatencyCombineCase one = make_low_latency_combine_case({.tokens = {4, 4}, .max_tokens = 4, .hidden = 512});
  const Case normal = make_case({.tokens = {3, 5}, .hidden = 64});
  run_cluster(cluster(2), [&](Rank& rank) {
    const auto executor = std::make_shared<EnteredExecutor>(rank.executor());
    int before = 0;
    const auto expect_left = [&](const char* what) {
      require(executor->depth == 0 && executor->kept == 0, std::string(what) + ": the device stays current");
      require(executor->entered > before, std::string(what) + ": the device was not current");
      before = executor->entered;
    };
    BufferOptions options = low_latency_options(2, 4, 512);
    options.low_latency.masking = true;
    Buffer buffer(rank.bootstrap(), executor, options);
    expect_left("the constructor");
    const Inputs inputs = upload_inputs(rank, normal);
    buffer.dispatch(inputs.dispatch, rank.call());
    expect_left("dispatch");
    const auto sent = buffer.low_latency_dispatch(with_hook(upload_arguments(rank, one.before)), rank.call());
    expect_left("low_latency_dispatch");
    sent.hook();
    expect_left("a hook");
    buffer.low_latency_combine(upload_combine(rank, one, sent.handle), rank.call());
    expect_left("low_latency_combine");
    executor->refused_request = 3;
    require_throws<Refused>([&] { buffer.barrier(rank.call()); }, {}, "barrier");
    expect_left("a call that fails");
    executor->refused_request = 0;
    buffer.barrier(rank.call());
    buffer.low_latency_resume();
    buffer.suspend();
    buffer.resume();
    expect_left("resume");
    buffer.check();
    buffer.destroy();
    expect_left("destroy");
  });
}

TEST(StreamOfEachThread, IsRefused) {
  const Device gpu{Device::Kind::cuda, 0}, cpu{Device::Kind::cpu, 0};
  void* const per_thread = reinterpret_cast<void*>(std::uintptr_t{2});
  require_throws<InvalidArgument>([&] { check_stream(gpu, "comm_stream", per_thread); },
                                  {"comm_stream must be", "cudaStreamPerThread", "cudaStreamCreate"}, "comm_stream");
  check_stream(gpu, "stream", nullptr);
  check_stream(gpu, "stream", reinterpret_cast<void*>(std::uintptr_t{1}));  // cudaStreamLegacy
  check_stream(cpu, "stream", per_thread);
}

TEST_P(CurrentDeviceTest, ThreadsHaveNamesAndLeaveSignalsToTheProgram) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "there kernels run on threads";
  std::set<std::string> names;
  run_with_buffers(cluster(2), {}, [&](Rank& rank, Buffer&) {
    if (rank.rank() != 0) return;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
      std::string name, word;
      if (!(std::ifstream(task.path() / "comm") >> name) || !kNames.contains(name)) continue;
      std::ifstream status(task.path() / "status");
      while (status >> word && word != "SigBlk:") {
      }
      if (!(status >> word)) continue;  // it has ended
      const auto blocked = [mask = std::stoull(word, nullptr, 16)](int signal) {
        return (mask >> (signal - 1) & 1) != 0;
      };
      require(blocked(SIGTERM) && blocked(SIGINT) && !blocked(SIGSEGV) && !blocked(SIGBUS), name + " blocks " + word);
      names.insert(name);
    }
  });
  EXPECT_EQ(names, kNames);
}

}  // namespace
}  // namespace deep_ep::test
