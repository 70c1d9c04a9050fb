// Ranks as threads that a benchmark drives in lockstep.
#pragma once

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "bench_support/normal_mode_rank.hpp"
#include "bench_support/low_latency_rank.hpp"
#include "bench_support/peers.hpp"

namespace deep_ep::benchmarks {

/// What each rank has.
struct RankContext {
  const std::shared_ptr<Bootstrap>& bootstrap;
  const std::shared_ptr<Executor>& executor;
  tools::NormalModeBench& bench;
  std::unique_ptr<tools::PeerTransport> transport;      ///< of the benchmarks that measure another means
  CachedDispatchResult dispatched;                      ///< the rows of the latest round
  std::unique_ptr<tools::LowLatencyBench> low_latency;  ///< of the benchmarks of that mode
};

class Cluster {
 public:
  using Step = std::function<void(RankContext&)>;

  Cluster(const tools::WorkloadShape& shape, Device::Kind device);
  ~Cluster();
  Cluster(const Cluster&) = delete;
  Cluster& operator=(const Cluster&) = delete;

  const tools::WorkloadShape& shape() const { return shape_; }
  const tools::Routes& routes() const { return routes_; }

  /// Runs `step` on all ranks, waits for its kernels and returns the seconds of the slowest rank. Rethrows what a rank
  /// threw; after that the cluster is of no more use.
  double run(const Step& step);

 private:
  void rank_main(int rank);
  void serve(RankContext& context);

  tools::WorkloadShape shape_;
  tools::Routes routes_;
  Device::Kind device_;
  std::vector<std::shared_ptr<Bootstrap>> bootstraps_;

  std::mutex mutex_;
  std::condition_variable changed_;
  const Step* step_ = nullptr;
  int round_ = 0;    ///< number of the step to run
  int running_ = 0;  ///< ranks that have not finished it
  bool stop_ = false;
  double slowest_ = 0;
  std::exception_ptr failure_;
  std::vector<std::thread> threads_;  // last: they use all of the above
};

}  // namespace deep_ep::benchmarks
