// The symmetric heap on machines without a GPU: anonymous shared memory.
#pragma once

#include <memory>

#include "csrc/memory/process_identity.hpp"
#include "csrc/memory/symmetric_heap.hpp"

namespace deep_ep {

class Bootstrap;

/// Collective. Ranks of the same process see a peer's heap at the address where its owner has it (ThreadSanitizer
/// compares addresses); other processes of the host get descriptors of it, through sockets of their network namespace;
/// other hosts do not map it. Memory is allocated when it is touched. `identity` says where this rank lives.
std::unique_ptr<SymmetricHeap> make_host_heap(Bootstrap& bootstrap, const HeapOptions& options,
                                              const ProcessIdentity& identity = this_process());

}  // namespace deep_ep
