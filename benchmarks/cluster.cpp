#include "benchmarks/cluster.hpp"

#include <algorithm>
#include <chrono>

namespace deep_ep::benchmarks {

Cluster::Cluster(const tools::WorkloadShape& shape, Device::Kind device)
    : shape_(shape), routes_(shape), device_(device), bootstraps_(make_thread_bootstraps(shape.ranks)) {
  for (int rank = 0; rank < shape.ranks; ++rank) threads_.emplace_back([this, rank] { rank_main(rank); });
}

Cluster::~Cluster() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
    changed_.notify_all();
  }
  for (std::thread& thread : threads_) thread.join();
}

double Cluster::run(const Step& step) {
  std::unique_lock lock(mutex_);
  if (failure_) std::rethrow_exception(failure_);
  step_ = &step;
  slowest_ = 0;
  running_ = shape_.ranks;
  ++round_;
  changed_.notify_all();
  changed_.wait(lock, [&] { return running_ == 0 || failure_; });
  if (failure_) std::rethrow_exception(failure_);
  return slowest_;
}

void Cluster::rank_main(int rank) {
  try {
    const auto& bootstrap = bootstraps_[static_cast<std::size_t>(rank)];
    const auto executor = tools::make_executor(device_, rank);
    tools::NormalModeBench bench(shape_, routes_, bootstrap, executor);
    RankContext context{bootstrap, executor, bench, nullptr, {}, nullptr};
    serve(context);
    context.transport.reset();
    context.dispatched = {};
    if (context.low_latency) context.low_latency->destroy();
    bench.destroy();
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
    changed_.notify_all();
  }
}

void Cluster::serve(RankContext& context) {
  for (int served = 0;;) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stop_ || round_ > served; });
      if (stop_) return;
      served = round_;
    }
    context.bootstrap->barrier();  // threads wake one after the other
    const auto begin = std::chrono::steady_clock::now();
    (*step_)(context);
    context.executor->synchronize(context.low_latency ? context.low_latency->stream() : context.bench.stream());
    const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    const std::lock_guard lock(mutex_);
    slowest_ = std::max(slowest_, seconds);
    if (--running_ == 0) changed_.notify_all();
  }
}

}  // namespace deep_ep::benchmarks
