// The thread of a handler: looks for work again and again, and sleeps where there is none.
#pragma once

#include <functional>
#include <stop_token>
#include <vector>

namespace deep_ep::rdma {

/// Calls `step`, which says whether there was work, until stopped. `cpus`: where the calling thread is to run, of those
/// that this process may use; empty: anywhere. `for_device`: it sleeps briefly, for a slow look would cost more than
/// the CPU.
void poll(const std::stop_token& stop, const std::vector<int>& cpus, bool for_device,
          const std::function<bool()>& step);

}  // namespace deep_ep::rdma
