// Queue pairs between ranks of one host whose heaps this process has mapped: the handler `cpu` copies between them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <vector>

#include "csrc/memory/symmetric_heap.hpp"
#include "csrc/rdma/ends.hpp"
#include "csrc/rdma/ring/wire.hpp"

namespace deep_ep {
class Executor;
}

namespace deep_ep::rdma {

/// By which ranks of one host know a rank's heap; none is 0, which is no key.
constexpr std::uint32_t heap_key(int rank) { return 0x10000 + static_cast<std::uint32_t>(rank); }

/// By key, from heap_key(0) on: the heaps of this rank and its peers as this rank has mapped them. SystemError, with
/// the name of the wire: it has not mapped one.
std::vector<device::rdma::Region> mapped_regions(const SymmetricHeap& heap, const ConnectionOptions& options,
                                                 std::string_view wire);

/// For tests.
struct LocalTrial {
  std::function<std::unique_ptr<Wire>(Wire&)> wrap = {};  ///< what stands between the handler and its wire
  bool by_executor = false;                               ///< the executor copies, as on GPUs
};

/// Errors of mapped_regions().
std::unique_ptr<Ends> make_local_ends(const std::shared_ptr<Executor>& executor, const SymmetricHeap& heap,
                                      const ConnectionOptions& options, const LocalTrial& trial = {});

}  // namespace deep_ep::rdma
