// The symmetric heap on GPUs. Three ways to share memory, see heap_choice.hpp for which is taken when.
#pragma once

#include <memory>

#include "csrc/executor/cuda/context.hpp"
#include "csrc/memory/symmetric_heap.hpp"
#include "deep_ep/bootstrap.hpp"

namespace deep_ep {

/// Collective. Where it fails on one rank, it throws on every rank.
std::unique_ptr<SymmetricHeap> make_cuda_heap(std::shared_ptr<const cuda::Context> context, Bootstrap& bootstrap,
                                              const HeapOptions& options);

}  // namespace deep_ep
