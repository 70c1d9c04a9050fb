#include "simulation/nic_runner.hpp"

#include <chrono>
#include <exception>
#include <string_view>
#include <utility>

#include "csrc/memory/executor_memory.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {
namespace {

using std::chrono::milliseconds;

constexpr std::size_t kLaunchesAhead = 4;  ///< launches enqueued: the thread may be late by that many idle times

}  // namespace

NicRunner::NicRunner(std::shared_ptr<Backend> executor, const SimulatedNicParams& params, const LaunchShape& shape)
    : executor_(std::move(executor)),
      words_(pinned_memory<Words>(executor_)),
      params_(params),
      shape_(shape),
      stream_(*executor_) {
  // On the CPU nobody waits for the device, and a launch takes as long as many polls.
  const bool cuda = executor_->device().kind == Device::Kind::cuda;
  const milliseconds idle(cuda ? 2 : 20), most(cuda ? 100 : 500);
  params_.stop = &words_->stop;
  params_.serving = &words_->serving;
  params_.idle_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(idle).count());
  params_.most_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(most).count());
  executor_->load_kernels();
  thread_ = std::jthread([this, nap = idle / 2](const std::stop_token& stop) {
    try {
      executor_->make_current();
      while (!stop.stop_requested()) {
        keep_running(stop);
        std::this_thread::sleep_for(nap);
      }
    } catch (const std::exception& error) {
      // A process that ends without giving its buffer back: nobody is left to care.
      const bool unloading = std::string_view(error.what()).find("cudaErrorCudartUnloading") != std::string_view::npos;
      if (!unloading) log::error("rdma: the simulated NIC is gone: {}", error.what());
      const std::lock_guard lock(mutex_);
      failure_ = error.what();
    }
  });
  try {
    wait_until_serving();
  } catch (const std::exception& error) {
    log::error("rdma: {}; waiting until what was launched has ended", error.what());
    end();
    throw;
  }
}

void NicRunner::end() noexcept {
  thread_.request_stop();
  __atomic_store_n(&words_->stop, 1, __ATOMIC_RELEASE);
  thread_.join();
  try {
    executor_->make_current();
    executor_->synchronize(stream_.get());
  } catch (const std::exception& error) {
    log::warn("rdma: the simulated NIC has not ended well: {}", error.what());
  }
}

void NicRunner::keep_running(const std::stop_token& stop) {
  while (!ends_.empty() && executor_->event_done(ends_.front())) ends_.pop_front();
  while (ends_.size() < kLaunchesAhead && !stop.stop_requested()) {
    ++params_.launch;
    executor_->kernels().simulated_nic(params_, shape_, stream_.get());
    ends_.push_back(executor_->record_event(stream_.get()));
  }
}

void NicRunner::wait_until_serving() const {
  const Deadline deadline(60);
  while (__atomic_load_n(&words_->serving, __ATOMIC_ACQUIRE) == 0) {
    if (const std::string why = failure(); !why.empty()) fail<SystemError>("the simulated NIC does not start: {}", why);
    if (deadline.expired()) {
      fail<SystemError>("the simulated NIC does not start within {} s: other kernels leave it no multiprocessor of {}",
                        deadline.seconds(), to_string(executor_->device()));
    }
    std::this_thread::sleep_for(milliseconds(1));
  }
}

std::string NicRunner::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace deep_ep::rdma
