// Replicas of experts on other ranks than their own (DeepEP V2.5's lb_prefetch_weights and lb_reduce_grads). With
// several nodes, each node has its own experts, replicas and calls. Symbols: R ranks of a node, L experts that each of
// them owns, C slots for replicas on each of them.
//
// All tensors are contiguous (row-major) and lie on the buffer's device. Those of slots lie in the heap
// (Buffer::allocate_tensor), at the same offset on all ranks: as they do where all ranks allocate the same tensors, in
// the same order, before other calls. The kernels read `redundancy_mapping`, the host does not: a call may be recorded
// into a CUDA graph. It needs no window, and may come between a dispatch and its combine.
#pragma once

#include <vector>

#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// Equal on all ranks of a node: C, L, the number of tensors, their bytes, and the mapping.
struct WeightPrefetch {
  /// 1 to 16 tensors [C, any number] of any dtype, written. An expert's part of each has a multiple of 16
  /// bytes below 2^31.
  std::vector<TensorView> redundant_expert_weights = {};
  /// As many tensors [L, any number]; an expert's part has as many bytes as a slot.
  std::vector<ConstTensorView> expert_weights = {};
  /// [R, C] int32: the expert of each slot of each rank, those of the node's rank r being r * L to r * L + L - 1. Any
  /// other number, as -1, stands for no expert.
  ConstTensorView redundancy_mapping = {};
  int num_sms = 0;  ///< at most so many SMs of this rank; 0: 16
};

/// Equal on all ranks of a node: as above.
struct GradReduction {
  ConstTensorView redundant_expert_grads = {};  ///< [C, n] float32
  TensorView expert_grads = {};                 ///< [L, n] float32: each replica's gradients are added
  ConstTensorView redundancy_mapping = {};      ///< as above
  int num_sms = 0;                              ///< as above
};

}  // namespace deep_ep
