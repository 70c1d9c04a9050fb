// Queue pairs between ranks of one host whose heaps this process has mapped: the handler `cpu` copies between them.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string_view>

#include "csrc/memory/symmetric_heap.hpp"
#include "csrc/rdma/ends.hpp"
#include "csrc/rdma/ring/wire.hpp"

namespace deep_ep {
class Executor;
}

namespace deep_ep::rdma {

/// Rank `peer`'s heap, perhaps this one's, as this rank has mapped it. SystemError, with the name of the wire: it has
/// not.
std::byte* mapped_heap(const SymmetricHeap& heap, int rank, int peer, std::string_view wire);

/// For tests.
struct LocalTrial {
  std::function<std::unique_ptr<Wire>(Wire&)> wrap = {};  ///< what stands between the handler and its wire
  bool by_executor = false;                               ///< the executor copies, as on GPUs
};

/// Errors of mapped_heap().
std::unique_ptr<Ends> make_local_ends(const std::shared_ptr<Executor>& executor, const SymmetricHeap& heap,
                                      const ConnectionOptions& options, const LocalTrial& trial = {});

}  // namespace deep_ep::rdma
