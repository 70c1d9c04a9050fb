// The symmetric heap on GPUs. Three ways to share memory, heap_choice.hpp says which one is used when.
#pragma once

#include <memory>

#include "csrc/executor/cuda/context.hpp"
#include "csrc/memory/symmetric_heap.hpp"
#include "deep_ep/bootstrap.hpp"

namespace deep_ep {

/// Collective. If it fails on one rank, it throws there, and on the others before their next exchange ends.
std::unique_ptr<SymmetricHeap> make_cuda_heap(std::shared_ptr<const cuda::Context> context, Bootstrap& bootstrap,
                                              const HeapOptions& options);

}  // namespace deep_ep
