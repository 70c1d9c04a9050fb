// A CPU executor that sees every kernel on its way into a stream.
#pragma once

#include <utility>

#include "kernels/elastic/params.hpp"
#include "kernels/load_balance/params.hpp"
#include "kernels/low_latency/params.hpp"
#include "kernels/normal/layout.hpp"
#include "kernels/normal/params.hpp"
#include "kernels/primitives/host/launch.hpp"
#include "kernels/rows/params.hpp"
#include "simulation/kernels/nic_test.hpp"
#include "simulation/kernels/simulated_nic.hpp"
#include "tests/cluster/counting_executor.hpp"

namespace deep_ep::test {

class LaunchesExecutor : public CountingExecutor {
 public:
  using CountingExecutor::CountingExecutor;
  const KernelTable& kernels() const final {
    static const KernelTable seen = [] {
      KernelTable table;
#define DEEP_EP_MEMBER(name, Params, max_threads) table.name = &see<&KernelTable::name, Params>;
      DEEP_EP_KERNELS(DEEP_EP_MEMBER)
#undef DEEP_EP_MEMBER
      return table;
    }();
    next_ = {const_cast<LaunchesExecutor*>(this), &CountingExecutor::kernels()};
    return seen;
  }

 protected:
  /// Instead of host_machine::enqueue().
  virtual void launch(host_machine::KernelLaunch kernel, StreamHandle stream) = 0;

 private:
  template <auto kMember, class Params>
  static void see(const Params& params, const LaunchShape& shape, void* stream) {
    const struct Forget {
      ~Forget() { seen_ = nullptr; }
    } if_the_launcher_throws;
    seen_ = next_.owner;
    (next_.kernels->*kMember)(params, shape, stream);
  }
  /// A launcher calls this: the kernel of see() goes to its owner, which may call this again.
  static void enqueue(host_machine::KernelLaunch kernel, void* stream) {
    LaunchesExecutor* const owner = std::exchange(seen_, nullptr);
    owner != nullptr ? owner->launch(std::move(kernel), stream) : machine_enqueue_(std::move(kernel), stream);
  }
  static inline const auto machine_enqueue_ = std::exchange(host_machine::enqueue, &LaunchesExecutor::enqueue);
  static inline thread_local LaunchesExecutor* seen_ = nullptr;

  /// Whose kernel is launched next: a launcher is only told its arguments.
  struct Next {
    LaunchesExecutor* owner;
    const KernelTable* kernels;
  };
  static inline thread_local Next next_;
};

}  // namespace deep_ep::test
