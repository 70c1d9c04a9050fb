// The symmetric heap on machines without a GPU: anonymous shared memory.
#pragma once

#include <memory>

#include "csrc/memory/symmetric_heap.hpp"

namespace deep_ep {

class Bootstrap;

/// Collective. Ranks of the same process see a peer's heap at the address where its owner has it (ThreadSanitizer
/// compares addresses); other processes map it through /proc/<pid>/fd. Memory is taken when it is touched.
std::unique_ptr<SymmetricHeap> make_host_heap(Bootstrap& bootstrap, const HeapOptions& options);

}  // namespace deep_ep
