// The arguments of calls of normal mode, inside a node and between nodes: checked, and as kernels are told of them.
#pragma once

#include <cstddef>

#include "deep_ep/buffer.hpp"
#include "kernels/common/rows.hpp"

namespace deep_ep {

/// Fixed when the buffer is made.
struct NormalModeSetup {
  int num_ranks = 1;
  int max_local_experts = 1;
  Device device;
  LaunchPolicy policy;
  bool reject_unknown_experts = true;
  std::size_t heap_bytes = 0;
  std::size_t window_bytes = 0;
  int max_window_tokens = 0;  ///< in a node: of tokens whose rows are pushed

  bool on_gpu() const { return device.kind == Device::Kind::cuda; }
};

/// Of arguments that have been checked, or are about to be.
inline int num_experts(const DispatchArguments& arguments) {
  return static_cast<int>(arguments.num_tokens_per_expert.size(0));
}

// Throw InvalidArgument.
void check_dispatch(const DispatchArguments& arguments, const NormalModeSetup& setup);
void check_dispatch(const CachedDispatchArguments& arguments, const NormalModeSetup& setup);
/// What every dispatch brings: rows, and maybe scales.
void check_sent_rows(const ConstTensorView& x, const std::optional<ConstTensorView>& x_scales, const Config& config,
                     const NormalModeSetup& setup);
void check_selections(const ConstTensorView& topk_idx, const std::optional<ConstTensorView>& topk_weights,
                      std::int64_t tokens, const NormalModeSetup& setup);
void check_combine(const CombineArguments& arguments, const NormalModeSetup& setup);

// Without what is only known later: memory that the call is given, and where it puts faults on record.
/// What all ranks must agree on before rows may move.
CallShape call_shape(const ConstTensorView& x, const std::optional<ConstTensorView>& x_scales,
                     const std::optional<ConstTensorView>& topk_idx, const std::optional<ConstTensorView>& topk_weights,
                     int num_experts);
NotifyCall notify_call(const DispatchArguments& arguments, const NormalModeSetup& setup);
/// Rows and their scales alone.
SentRows sent_rows(const ConstTensorView& x, const std::optional<ConstTensorView>& x_scales);
SentRows sent_rows(const DispatchArguments& arguments, const NormalModeSetup& setup);
SentRows sent_rows(const CachedDispatchArguments& arguments, const NormalModeSetup& setup);

}  // namespace deep_ep
