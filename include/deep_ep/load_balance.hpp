// Replicas of experts on other ranks than their own (DeepEP V2.5's lb_prefetch_weights and lb_reduce_grads). Each node
// has its own experts, replicas and calls. Symbols: R ranks of a node, L experts of each rank, C slots for replicas on
// each rank.
//
// All tensors are contiguous (row-major) and are on the buffer's device. Slots are in the heap
// (Buffer::allocate_tensor) at the same offset on all ranks: allocate the same tensors in the same order on all ranks,
// before other calls. Kernels read `redundancy_mapping`, so a call may be recorded into a CUDA graph. A call needs no
// window, and may come between a dispatch and its combine.
#pragma once
// SPDX-License-Identifier: MIT

#include <vector>

#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// Equal on all ranks of a node: C, L, the number of tensors, their bytes, and the mapping.
struct WeightPrefetch {
  /// 1 to 16 tensors [C, n] of any dtype, written. A slot has a multiple of 16 bytes below 2^31.
  std::vector<TensorView> redundant_expert_weights = {};
  /// As many tensors [L, n]; an expert has as many bytes as a slot.
  std::vector<ConstTensorView> expert_weights = {};
  /// [R, C] int32: the expert of each slot of each rank. Rank r of the node owns experts r * L to r * L + L - 1. Any
  /// other number, as -1, is no expert.
  ConstTensorView redundancy_mapping = {};
  int num_sms = 0;  ///< the most SMs of this rank; 0: 16
};

/// Equal on all ranks of a node: as above.
struct GradReduction {
  ConstTensorView redundant_expert_grads = {};  ///< [C, n] float32
  TensorView expert_grads = {};                 ///< [L, n] float32: the call adds each replica's gradients
  ConstTensorView redundancy_mapping = {};      ///< as above
  int num_sms = 0;                              ///< as above
};

}  // namespace deep_ep
