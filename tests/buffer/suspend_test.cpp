// An engine that sleeps: the heap's memory goes, and comes back at the same addresses with what it held.
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "tests/cluster/fixture.hpp"
#include "tests/cluster/low_latency_combine_case.hpp"

namespace deep_ep::test {
namespace {

class SuspendTest : public ClusterTest {};
DEEP_EP_ON_THREADS(SuspendTest);
class SuspendProcessesTest : public ClusterTest {};
DEEP_EP_ON_PROCESSES(SuspendProcessesTest);

/// Calls of both modes, of which parts lie before, between and behind two sleeps.
void sleep_amid_calls(const ClusterOptions& cluster) {
  const Case one = make_case({.tokens = {8, 9, 4}});
  const LowLatencyCombineCase small =
      make_low_latency_combine_case({.tokens = {5, 7, 3}, .max_tokens = 7, .hidden = 256, .topk = 3});
  const auto sums = small.expected();
  run_with_buffers(cluster, low_latency_options(3, 7, 256), [&](Rank& rank, Buffer& buffer) {
    run_round(rank, buffer, one);
    const Inputs inputs = upload_inputs(rank, one);
    const DispatchResult before = buffer.dispatch(inputs.dispatch, rank.call());
    const LowLatencyHandle handle = dispatch_low_latency(rank, buffer, small);
    const LowLatencyCombineArguments arguments = upload_combine(rank, small, handle);
    const auto pending = buffer.low_latency_combine(with_hook(arguments), rank.call());
    const TensorView in_heap = before.recv_x.view();
    require(in_heap.elements() == 0 || buffer.in_heap(in_heap), "rows are received in the heap");
    void* const heap = buffer.local_memory().data;
    for (int sleep = 0; sleep < 2; ++sleep) {
      buffer.suspend();
      if (cluster.where.target == Target::host && in_heap.elements() != 0) {
        const auto gone = rank.download_bytes(in_heap);
        require(gone == std::vector<std::byte>(gone.size()), "the memory is gone");
      }
      rank.bootstrap()->barrier();  // the download is over
      require_throws<InvalidArgument>([&] { buffer.dispatch(inputs.dispatch, rank.call()); }, {"is suspended"},
                                      "is suspended");
      require_throws<InvalidArgument>([&] { pending.hook(); }, {"is suspended"}, "is suspended");
      require_throws<InvalidArgument>([&] { buffer.suspend(); }, {"is suspended"}, "is suspended");
      buffer.check();
      buffer.resume();
      require(buffer.local_memory().data == heap, "addresses stay");
    }
    require_throws<InvalidArgument>([&] { buffer.resume(); }, {"not suspended"}, "not suspended");
    check_dispatch(rank, one, before);
    Returned returned = upload_returned(rank, buffer, one, before.handle, true);
    check_combine(rank, one, buffer.combine(returned.combine, rank.call()));
    pending.hook();
    check_low_latency_combine(rank, small, sums, pending.combined_x.view());
    const auto again = buffer.low_latency_combine(arguments, rank.call());
    check_low_latency_combine(rank, small, sums, again.combined_x.view());
    run_round(rank, buffer, one);
    buffer.suspend();
  });
}

TEST_P(SuspendTest, EverythingIsAsBefore) { sleep_amid_calls(cluster(3)); }
TEST_P(SuspendProcessesTest, EverythingIsAsBefore) { sleep_amid_calls(cluster(3)); }

/// Sets a limit of this process as long as it lives.
class Limit {
 public:
  Limit(__rlimit_resource resource, rlim_t most) : resource_(resource) {
    require(::getrlimit(resource, &before_) == 0, "getrlimit");
    const rlimit scarce{std::min(most, before_.rlim_max), before_.rlim_max};
    require(::setrlimit(resource, &scarce) == 0, "setrlimit");
  }
  ~Limit() { ::setrlimit(resource_, &before_); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

 private:
  __rlimit_resource resource_;
  rlimit before_{};
};

/// Rank 1 has no room for what its heap holds, and then no descriptor for new memory. What has failed on one rank has
/// happened on none.
TEST_P(SuspendProcessesTest, AFailureOfOneRankChangesNothing) {
  if (GetParam().target != Target::host) GTEST_SKIP() << "limits of processes are of memory on the CPU";
  const Case one = make_case({.tokens = {8, 9, 4}});
  run_with_buffers(cluster(3), [&](Rank& rank, Buffer& buffer) {
    const DispatchResult before = buffer.dispatch(upload_inputs(rank, one).dispatch, rank.call());
    const auto is_as_before = [&] {
      check_dispatch(rank, one, before);
      run_round(rank, buffer, one);
    };
    if (!under_sanitizer()) {  // whose allocators end the process
      if (rank.rank() == 1) {
        std::size_t pages = 0;
        std::ifstream("/proc/self/statm") >> pages;
        const Limit memory(RLIMIT_AS, pages * static_cast<std::size_t>(::getpagesize()) + (std::size_t{16} << 20));
        require_throws<OutOfMemory>([&] { buffer.suspend(); }, {"suspend: the host has"}, "no room");
      } else {
        require_throws<SystemError>([&] { buffer.suspend(); }, {"failed on rank 1", "the host has"}, "no room");
      }
      is_as_before();
    }
    buffer.suspend();
    for (int time = 0; time < 2; ++time) {
      if (rank.rank() == 1) {
        const Limit descriptors(RLIMIT_NOFILE, 0);
        require_throws<SystemError>([&] { buffer.resume(); }, {"Too many open files"}, "no descriptor");
      } else {
        require_throws<SystemError>([&] { buffer.resume(); }, {"failed on rank 1"}, "no descriptor");
      }
      require_throws<InvalidArgument>([&] { buffer.barrier(rank.call()); }, {"is suspended"}, "is suspended still");
    }
    buffer.resume();
    is_as_before();
  });
}

TEST_P(SuspendTest, IsRefusedBetweenNodes) {
  const Case one = make_case({.tokens = {3, 4}, .ranks_per_node = 1});
  run_with_buffers(cluster(2), {.heap_bytes = std::size_t{64} << 20, .ranks_per_node = 1},
                   [&](Rank& rank, Buffer& buffer) {
                     require_throws<Unsupported>([&] { buffer.suspend(); }, {"RDMA"}, "RDMA");
                     run_round(rank, buffer, one);
                   });
}

}  // namespace
}  // namespace deep_ep::test
