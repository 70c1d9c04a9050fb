// Queue pairs between ranks of one host whose NICs are played by a kernel on each rank's device, with the rings,
// records, doorbells and completions of an mlx5 device.
#pragma once

#include <memory>

#include "csrc/memory/symmetric_heap.hpp"
#include "csrc/rdma/discovery/settings.hpp"
#include "csrc/rdma/ends.hpp"

namespace deep_ep {
class Executor;
}

namespace deep_ep::rdma {

/// SystemError where a peer's heap is not mapped, or there are more queue pairs than the kernel can serve. `handler`:
/// gpu or doorbell. On GPUs the NIC looks for doorbells of a thread in host memory, which takes it longer than a
/// device.
std::unique_ptr<Ends> make_simulated_ends(const std::shared_ptr<Executor>& executor, const SymmetricHeap& heap,
                                          const ConnectionOptions& options, const SimulatedNic& nic,
                                          NicHandler handler = NicHandler::gpu);

}  // namespace deep_ep::rdma
