// Processes that have died are replaced by new ones, which meet the others in a group of their own.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/support/unique_fd.hpp"
#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"
#include "tests/cluster/rank_processes.hpp"
#include "tests/cluster/recording_executor.hpp"
#include "tests/faults/freezer.hpp"

namespace deep_ep::test {
namespace {

constexpr int kRanks = 4;

class ReplacedRankTest : public ClusterTest {
 protected:
  bool processes_have_threads() const override { return true; }
};
INSTANTIATE_TEST_SUITE_P(On, ReplacedRankTest, testing::Values(Where{Target::host, Placement::processes}),
                         name_of_place);

/// Groups of processes of this test: the same number is the same group.
std::string meeting_file(int number) {
  const int test = testing::UnitTest::GetInstance()->current_test_info()->line();
  return fmt::format("/dev/shm/deep_ep_{}_{}_{}", test, rank_process().parent, number);
}
std::shared_ptr<Bootstrap> meet(int number, int rank, double timeout_s = cluster_patience() / 2) {
  const UniqueFd file(::open(meeting_file(number).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
  return make_file_bootstrap(file.get(), rank, kRanks, timeout_s);
}

/// A dead process is masked at once: no call waits so long.
BufferOptions masking_options() { return low_latency_options(kRanks, 6, 256, cluster_patience() / 2, true); }

LowLatencyCombineCase some_case() {
  return make_low_latency_combine_case(
      {.tokens = {5, 4, 6, 3}, .max_tokens = 6, .hidden = 256, .local_experts = 2, .topk = 3});
}

void make_calls(Rank& rank, Buffer& buffer, const LowLatencyCombineCase& one) {
  dispatch_and_combine(rank, buffer, one, one.expected());
  buffer.check();
}

/// Each mistake is an error on all ranks, and those that live go on without the lost one, until a process comes that
/// fits.
TEST_P(ReplacedRankTest, Mistakes) {
  constexpr int kLost = 3, kMisfit = 4, kNewcomer = 5;
  const LowLatencyCombineCase all = some_case();
  const LowLatencyCase rest = with_masks(all.before, masks_without(kRanks, kLost));
  ClusterOptions options = cluster(6);
  options.lost_ranks = {kLost};
  run_cluster(options, [&](Rank& process) {
    const int self = std::min(process.rank(), kLost);
    const int first = process.rank() == kMisfit ? 2 : process.rank() == kNewcomer ? 4 : 0;
    Rank rank(self, cluster(kRanks), meet(first, self), process.executor());
    if (process.rank() == kMisfit) {
      BufferOptions larger = masking_options();
      larger.low_latency.bytes *= 2;
      require_throws<RankMismatch>([&] { Buffer(rank.bootstrap(), process.executor(), larger); },
                                   {"low_latency.bytes", "rank 3"}, "a new process with other shapes");
      return;
    }
    Buffer buffer(rank.bootstrap(), process.executor(), masking_options());
    const std::vector lost{kLost};
    if (first == 0) {
      make_calls(rank, buffer, all);
      require_throws<InvalidArgument>([&] { buffer.replace_ranks(meet(1, self), lost); },
                                      {"rank 3", self == kLost ? "itself" : "lives"}, "a rank that lives");
      make_calls(rank, buffer, all);
      rank.bootstrap()->barrier();  // no rank is in a call that the lost rank has left
      if (self == kLost) ::raise(SIGKILL);
      dispatch_and_check(rank, buffer, rest);
      require_throws<InvalidArgument>([&] { buffer.replace_ranks(meet(5, self, 0.1), {}); }, {"at least one"}, "none");
      require_throws<RankMismatch>([&] { buffer.replace_ranks(meet(2, self), lost); }, {"low_latency.bytes"}, "shapes");
      dispatch_and_check(rank, buffer, rest);
      require_throws<TimeoutError>([&] { buffer.replace_ranks(meet(3, self, scaled(0.5)), lost); }, {"rank 3"},
                                   "no process comes");
      for (int i = 0; i < 3; ++i) dispatch_and_check(rank, buffer, rest);
      require_same({kLost}, buffer.lost_ranks(), "lost ranks");
      buffer.replace_ranks(meet(4, self), lost);
    }
    for (int i = 0; i < 3; ++i) make_calls(rank, buffer, all);
    require_throws<Unsupported>([&] { buffer.barrier(); }, {"Buffer::barrier", "low-latency"}, "another call");
    buffer.destroy();
    for (int number = 0; self == 1 && number <= 5; ++number) ::unlink(meeting_file(number).c_str());
  });
}

/// Its freezer sees every kernel.
class WatchedExecutor final : public LaunchesExecutor {
 public:
  using LaunchesExecutor::LaunchesExecutor;
  const std::shared_ptr<faults::Freezer> freezer = std::make_shared<faults::Freezer>();

 private:
  void launch(host_machine::KernelLaunch kernel, StreamHandle stream) override {
    host_machine::enqueue(watched(std::move(kernel), freezer), stream);
  }
};

/// Rank 0 leaves a dispatch half done; process 4 takes its place.
TEST_P(ReplacedRankTest, ARankDiesInTheMiddleOfACall) {
  const LowLatencyCombineCase all = some_case();
  ClusterOptions options = cluster(kRanks + 1);
  options.lost_ranks = {0};
  run_cluster(options, [&](Rank& process) {
    const bool newcomer = process.rank() == kRanks;
    const int self = process.rank() % kRanks;
    Rank rank(self, cluster(kRanks), meet(newcomer ? 1 : 0, self), process.executor());
    const auto executor = std::make_shared<WatchedExecutor>(process.executor());
    Buffer buffer(rank.bootstrap(), executor, masking_options());
    if (!newcomer) {
      make_calls(rank, buffer, all);
      rank.bootstrap()->barrier();  // no rank is in a call that the dying rank has left
      if (self == 0) executor->freezer->arm(200, 0, [] { ::raise(SIGKILL); });
      buffer.low_latency_dispatch(upload_arguments(rank, all.before), rank.call());
      settle(rank, buffer);
      require(self != 0, "a dispatch has fewer events");
      dispatch_and_check(rank, buffer, with_masks(all.before, masks_without(kRanks, 0)));
      require_same({0}, buffer.lost_ranks(), "lost ranks");
      buffer.replace_ranks(meet(1, self), std::vector{0});
    }
    for (int i = 0; i < 3; ++i) make_calls(rank, buffer, all);
    buffer.destroy();
    for (int number = 0; self == 1 && number <= 1; ++number) ::unlink(meeting_file(number).c_str());
  });
}

/// A lost rank may have sent rows of calls that the others have not made yet. They are not rows of the new process.
/// Rank 0 is processes 0, 4 and 5: it gives verdicts, and named the buffer in the control plane. The others keep
/// addresses and what they have recorded.
TEST_P(ReplacedRankTest, RowsOfTheLostRankAreForgotten) {
  constexpr int kTimes = 2;
  const LowLatencyCombineCase all = some_case();
  LowLatencyCaseShape shape = all.before.shape;
  shape.seed = 7;
  const LowLatencyCombineCase other = make_low_latency_combine_case(shape);
  ClusterOptions options = cluster(kRanks + kTimes);
  options.lost_ranks = {0, kRanks};
  run_cluster(options, [&](Rank& process) {
    const int first = std::max(0, process.rank() - kRanks + 1);
    const int self = first == 0 ? process.rank() : 0;
    Rank rank(self, cluster(kRanks), meet(first, self), process.executor());
    const auto executor = std::make_shared<RecordingExecutor>(process.executor());
    Buffer buffer(rank.bootstrap(), executor, masking_options());
    const void* const memory = buffer.local_memory().data;
    LowLatencyDispatchResult dispatched;  // recorded once
    LowLatencyCombineResult combined;
    std::shared_ptr<Bootstrap> group = rank.bootstrap();  // of those that make calls now
    for (int time = first;; ++time) {
      for (int i = 0; i < 4; ++i) make_calls(rank, buffer, i % 2 == 0 ? other : all);
      if (time == first) {
        const LowLatencyDispatchArguments arguments = upload_arguments(rank, all.before);
        record(rank, *executor, [&] { dispatched = buffer.low_latency_dispatch(arguments, rank.call()); });
        const LowLatencyCombineArguments combine = upload_combine(rank, all, dispatched.handle);
        record(rank, *executor, [&] { combined = buffer.low_latency_combine(combine, rank.call()); });
      } else {
        for (const Tensor* made : {&dispatched.recv_x, &combined.combined_x}) {
          rank.write(made->view(), std::vector<std::byte>(made->view().bytes(), std::byte{0x55}));
        }
        executor->replay();
      }
      settle(rank, buffer);
      check_low_latency_dispatch(rank, all.before, dispatched);
      check_low_latency_combine(rank, all, all.expected(), combined.combined_x.view());
      require(buffer.lost_ranks().empty(), "no rank is lost");
      require(buffer.local_memory().data == memory, "the heap stays where it is");
      if (time == kTimes) break;
      group->barrier();  // no rank is in a call that the dying rank has left
      if (self == 0) {
        const auto sent = buffer.low_latency_dispatch(with_hook(upload_arguments(rank, all.before)), rank.call());
        rank.executor()->synchronize(rank.stream());
        ::raise(SIGKILL);
      }
      group = meet(time + 1, self);
      buffer.replace_ranks(group, std::vector{0});
    }
    buffer.destroy();
    for (int number = 0; self == 1 && number <= kTimes; ++number) ::unlink(meeting_file(number).c_str());
  });
}

}  // namespace
}  // namespace deep_ep::test
