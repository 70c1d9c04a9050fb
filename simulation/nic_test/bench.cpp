#include "simulation/nic_test/bench.hpp"

#include <algorithm>
#include <array>
#include <exception>
#include <utility>

#include "csrc/bootstrap/buffer_exchanges.hpp"
#include "csrc/memory/executor_memory.hpp"

namespace deep_ep::rdma::nic_test {
namespace {

namespace layout = deep_ep::nic_test;

constexpr std::size_t kWarps = 2 * std::size_t{kMostPairs};

}  // namespace

Bench::Bench(Bootstrap& bootstrap, const std::shared_ptr<Executor>& executor)
    : bootstrap_(bootstrap), executor_(backend_of(executor)), stream_(*executor_) {
  executor_->make_current();
  together("preparing the NIC test", [&](Bootstrap& ranks) {
    heap_ = executor_->create_heap(ranks, [](auto) { return kMostPairs * layout::kPairBytes; });
    results_ = pinned_memory<NicTestResult>(executor_, kWarps * sizeof(NicTestResult));
    faults_ = pinned_memory<FaultRecord>(executor_, 2 * sizeof(FaultRecord));
    abort_ = device_memory<std::uint64_t>(executor_);
  });
}

Bench::~Bench() {
  ends_.reset();
  heap_->unmap_peers();
}

void Bench::together(std::string_view what, const std::function<void(Bootstrap& ranks)>& step) {
  BufferExchanges exchanges({std::shared_ptr<void>(), &bootstrap_});
  exchanges.agree(what, [&] {
    step(exchanges);
    exchanges.barrier();
  });
}

void Bench::connect(NicHandler handler, const MakeEndsOn& make, int pairs) {
  ends_.reset();
  const int next = (bootstrap_.rank() + 1) % bootstrap_.size();  // of two ranks: the other; one talks to itself
  // A sender's end meets the receiver's of the same pair: what fails one way does not end the other.
  const ConnectionOptions options{.rank = bootstrap_.rank(),
                                  .peers = {next},
                                  .channels = 2 * pairs,
                                  .depth = kDepth,
                                  .sink = layout::kSink,
                                  .crossed = true};
  const auto make_here = [&](NicHandler one, const ConnectionOptions& set) { return make(one, *heap_, set); };
  together("connecting RDMA queue pairs", [&](Bootstrap& ranks) {
    ConnectedEnds made =
        std::move(make_connected_ends(ranks, std::array{options}, handler, /*may_fall_back=*/true, make_here).front());
    std::ranges::copy(made.params, params_.queues);  // one a channel
    ends_ = std::move(made.ends);
  });
}

Run Bench::run(const Task& task) {
  executor_->make_current();
  params_.task = task.what;
  for (RdmaQueuePair& queue : params_.queues) queue.remote_key ^= task.wrong_bits;
  params_.heap = heap_->local();
  params_.operations = task.operations;
  params_.budget_ns = static_cast<std::uint64_t>(task.seconds * 1e9);
  params_.results = results_.get();
  // Receivers of a stream see nothing before its end.
  const bool streams = !task.what.answered && task.what.entries != 0;
  const double wait_s = task.wait_s + (streams ? task.seconds : 0);
  params_.senders_wait = {faults_.get(), abort_.get(), static_cast<std::uint64_t>(wait_s * 1e9)};
  params_.receivers_wait = {faults_.get(), abort_.get(), static_cast<std::uint64_t>(2 * wait_s * 1e9)};
  Run run{.rank = bootstrap_.rank(), .pairs = task.pairs, .wait_s = wait_s};
  together("running a test", [&](Bootstrap& ranks) {
    std::fill_n(results_.get(), kWarps, NicTestResult{});
    std::fill_n(faults_.get(), 2, FaultRecord{});
    executor_->fill(abort_.get(), 0, sizeof *abort_, stream_.get());
    executor_->fill(heap_->local(), 0, static_cast<std::size_t>(task.pairs) * layout::kPairBytes, stream_.get());
    executor_->synchronize(stream_.get());
    ranks.barrier();  // no rank sends before all have cleared what will arrive
    executor_->kernels().nic_test(params_, {1, 64 * task.pairs, 0}, stream_.get());
    executor_->synchronize(stream_.get());
    for (int pair = 0; pair < task.pairs; ++pair) {
      const NicTestResult &sent = results_.get()[2 * pair], &received = results_.get()[2 * pair + 1];
      run.operations += sent.operations;
      run.bytes += sent.bytes;
      run.seconds = std::max(run.seconds, static_cast<double>(sent.nanoseconds) * 1e-9);
      if (received.wrong != 0 && !run.wrong) run.wrong = received;
    }
    if (faults_->claimed == 0) return;
    run.fault = *faults_;
    try {
      run.health = ends_->health();
    } catch (const std::exception& error) {
      run.health = error.what();
    }
  });
  return run;
}

}  // namespace deep_ep::rdma::nic_test
