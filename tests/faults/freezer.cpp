#include "tests/faults/freezer.hpp"

#include <utility>

namespace deep_ep::faults {
namespace {

using host_machine::Machine;

/// Passes everything on to the thread's block; each call is an event.
class FreezingMachine final : public Machine {
 public:
  FreezingMachine(Machine& block, Freezer& freezer) : block_(block), freezer_(freezer) {}

  void pause(int spins) override { next().pause(spins); }
  void interleave() override { next().interleave(); }
  void warp_sync() override { next().warp_sync(); }
  const std::byte* warp_exchange(const char* op, const void* value, int bytes) override {
    return next().warp_exchange(op, value, bytes);
  }
  bool block_sync(bool good) override { return next().block_sync(good); }
  void mbarrier_init(std::uint64_t& word) override { next().mbarrier_init(word); }
  void mbarrier_fence_init() override { next().mbarrier_fence_init(); }
  void mbarrier_arrive(std::uint64_t& word, std::uint32_t bytes) override { next().mbarrier_arrive(word, bytes); }
  void mbarrier_wait(std::uint64_t& word, std::uint32_t parity) override { next().mbarrier_wait(word, parity); }
  void bulk_load(void* shared, const void* global, std::uint32_t bytes, std::uint64_t& mbarrier) override {
    next().bulk_load(shared, global, bytes, mbarrier);
  }
  void bulk_store(void* global, const void* shared, std::uint32_t bytes) override {
    next().bulk_store(global, shared, bytes);
  }
  void bulk_commit() override { next().bulk_commit(); }
  void bulk_wait(int groups_left, bool reads_alone) override { next().bulk_wait(groups_left, reads_alone); }
  void bulk_fence_global() override { next().bulk_fence_global(); }

 private:
  Machine& next() {
    freezer_.event(block_);
    return block_;
  }

  Machine& block_;
  Freezer& freezer_;
};

struct Watched {
  std::shared_ptr<const void> params;
  void (*entry)(const void* params, std::byte* shared);
  std::shared_ptr<Freezer> freezer;
};

void run_watched(const void* params, std::byte* shared) {
  const auto& kernel = *static_cast<const Watched*>(params);
  host_machine::ThreadState& self = *host_machine::current_thread;
  FreezingMachine machine(*self.machine, *kernel.freezer);
  struct Restore {
    host_machine::ThreadState& state;
    host_machine::ThreadState before = state;
    ~Restore() {
      state.machine = before.machine;
      state.perturbed = before.perturbed;
    }
  } const restore{self};
  self.machine = &machine;
  self.perturbed = true;  // flags, too, ask the machine
  kernel.entry(kernel.params.get(), shared);
}

}  // namespace

host_machine::KernelLaunch watched(host_machine::KernelLaunch launch, std::shared_ptr<Freezer> freezer) {
  launch.params = std::make_shared<const Watched>(std::move(launch.params), launch.entry, std::move(freezer));
  launch.entry = &run_watched;
  return launch;
}

}  // namespace deep_ep::faults
