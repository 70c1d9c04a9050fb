// Device code of one thread as an ordinary function, with a device that works whenever the thread polls, touches a flag
// or may be interrupted: one seed is one history.
#pragma once

#include <functional>
#include <stdexcept>

#include "kernels/common/faults.hpp"
#include "kernels/primitives/host/machine.hpp"

namespace deep_ep::test {

/// While it lives, the calling thread is thread 0 of a kernel. `device` is called at every point where others may run,
/// and told whether the thread polls for something.
class Simulation final : public host_machine::Machine {
 public:
  explicit Simulation(std::function<void(bool waited_for)> device) : device_(std::move(device)) {
    state_.machine = this;
    state_.block_threads = 32;
    state_.grid_blocks = 1;
    state_.perturbed = true;
    host_machine::current_thread = &state_;
  }
  ~Simulation() override { host_machine::current_thread = nullptr; }
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  void pause(int) override { work(true); }
  void interleave() override { work(false); }

  void warp_sync() override { refuse(); }
  const std::byte* warp_exchange(const char*, const void*, int) override { return refuse(), nullptr; }
  bool block_sync(bool) override { return refuse(), false; }
  void mbarrier_init(std::uint64_t&) override { refuse(); }
  void mbarrier_fence_init() override { refuse(); }
  void mbarrier_arrive(std::uint64_t&, std::uint32_t) override { refuse(); }
  void mbarrier_wait(std::uint64_t&, std::uint32_t) override { refuse(); }
  void bulk_load(void*, const void*, std::uint32_t, std::uint64_t&) override { refuse(); }
  void bulk_store(void*, const void*, std::uint32_t) override { refuse(); }
  void bulk_commit() override { refuse(); }
  void bulk_wait(int, bool) override { refuse(); }
  void bulk_fence_global() override { refuse(); }

 private:
  void work(bool waited_for) {
    // The device is not a thread of the kernel: its own flags do not call it again.
    host_machine::current_thread = nullptr;
    device_(waited_for);
    host_machine::current_thread = &state_;
  }
  [[noreturn]] static void refuse() { throw std::logic_error("the simulation has one thread"); }

  std::function<void(bool)> device_;
  host_machine::ThreadState state_;
};

/// The words behind a WaitContext.
class Faults {
 public:
  WaitContext context(std::uint64_t timeout_ns) { return {records_, &abort_, timeout_ns}; }
  const FaultRecord& fault() const { return records_[0]; }

 private:
  FaultRecord records_[2] = {};
  std::uint64_t abort_ = 0;
};

}  // namespace deep_ep::test
