#include "csrc/rdma/ring/polling.hpp"

#include <sched.h>
#include <sys/prctl.h>

#include <chrono>
#include <thread>

#include "csrc/support/backoff.hpp"
#include "csrc/support/threads.hpp"

namespace deep_ep::rdma {
namespace {

/// The calling thread runs on these CPUs only, where this process may use any of them.
void keep_to(const std::vector<int>& cpus) {
  cpu_set_t allowed, wanted;
  CPU_ZERO(&wanted);
  for (const int cpu : cpus) {
    if (cpu < CPU_SETSIZE) CPU_SET(cpu, &wanted);
  }
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
  CPU_AND(&wanted, &wanted, &allowed);
  if (CPU_COUNT(&wanted) != 0) ::sched_setaffinity(0, sizeof wanted, &wanted);
}

}  // namespace

std::jthread polling_thread(std::vector<int> cpus, bool for_device, std::function<bool()> step) {
  const SignalsBlocked blocked;
  return std::jthread([=](const std::stop_token& stop) {
    name_this_thread("deep_ep_rdma");
    constexpr auto kSpin = std::chrono::microseconds(200);  // the next rows of a call are expected within that time
    constexpr auto kPause = std::chrono::milliseconds(2);   // the next call, while an engine works
    const bool serves_nic = !cpus.empty();                  // on a machine that has CPUs to spare
    keep_to(cpus);
    if (serves_nic) ::prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL);  // else every sleep takes 50 us more
    Backoff idle;
    while (!stop.stop_requested()) {
      if (step()) {
        idle.restart();
      } else if (const auto time = idle.time(); time <= kSpin) {
        std::this_thread::yield();
      } else if (for_device) {
        std::this_thread::sleep_for(std::chrono::microseconds(serves_nic && time <= kPause ? 5 : 50));
      } else {
        std::this_thread::sleep_for(idle.nap());
      }
    }
  });
}

}  // namespace deep_ep::rdma
