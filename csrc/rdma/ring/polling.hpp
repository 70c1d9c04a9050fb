// The thread of a handler: looks for work again and again, and sleeps where there is none.
#pragma once

#include <functional>
#include <thread>
#include <vector>

namespace deep_ep::rdma {

/// A thread that calls `step`, which says whether there was work, until stopped. `cpus`: where it is to run, of those
/// that this process may use; empty: anywhere. `for_device`: it sleeps briefly, for a slow look would cost more than
/// the CPU.
std::jthread polling_thread(std::vector<int> cpus, bool for_device, std::function<bool()> step);

}  // namespace deep_ep::rdma
