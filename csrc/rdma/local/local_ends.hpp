// Queue pairs between ranks of one host whose heaps this process has mapped: the handler `cpu` copies between them.
#pragma once

#include <functional>
#include <memory>

#include "csrc/memory/symmetric_heap.hpp"
#include "csrc/rdma/ends.hpp"
#include "csrc/rdma/ring/wire.hpp"

namespace deep_ep {
class Executor;
}

namespace deep_ep::rdma {

/// What stands between the handler and its wire; for tests of wires that are at fault.
using WrapWire = std::function<std::unique_ptr<Wire>(std::unique_ptr<Wire>)>;

/// SystemError where a peer's heap is not mapped.
std::unique_ptr<Ends> make_local_ends(const std::shared_ptr<Executor>& executor, const SymmetricHeap& heap, int rank,
                                      const ConnectionOptions& options, const WrapWire& wrap = {});

}  // namespace deep_ep::rdma
