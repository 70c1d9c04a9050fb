// Queue pairs between ranks of one host whose heaps this process has mapped: the handler `cpu` copies between them.
#pragma once

#include <memory>

#include "csrc/memory/symmetric_heap.hpp"
#include "csrc/rdma/ends.hpp"

namespace deep_ep {
class Executor;
}

namespace deep_ep::rdma {

/// SystemError where a peer's heap is not mapped.
std::unique_ptr<Ends> make_local_ends(const std::shared_ptr<Executor>& executor, const SymmetricHeap& heap, int rank,
                                      const EndsOptions& options);

}  // namespace deep_ep::rdma
