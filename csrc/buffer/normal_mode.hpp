// What calls of normal mode do on the host, inside a node and between nodes.
#pragma once

#include <optional>

#include "csrc/buffer/call_scope.hpp"
#include "csrc/buffer/normal_mode_arguments.hpp"
#include "csrc/buffer/runtime.hpp"
#include "deep_ep/buffer.hpp"
#include "kernels/common/messages.hpp"
#include "kernels/common/rows.hpp"

namespace deep_ep {

/// Results of a dispatch; those that the caller does not want are undefined.
struct DispatchOutputs {
  Tensor x, scales, topk_idx, topk_weights, src_idx;
  bool in_heap = true;

  RowTargets targets() const {
    return {x.as<std::byte>(), scales.as<std::uint32_t>(), topk_idx.as<std::byte>(), topk_weights.as<float>(),
            src_idx.as<std::int32_t>()};
  }
  /// Of a dispatch with these arguments.
  template <class Result, class Arguments>
  void give_to(Result& result, const Arguments& arguments) const {
    result.recv_x = x;
    if (arguments.x_scales) result.recv_x_scales = scales;
    if constexpr (requires { result.recv_topk_idx; }) {
      if (arguments.topk_idx) result.recv_topk_idx = topk_idx;
      if (arguments.topk_weights) result.recv_topk_weights = topk_weights;
    }
  }
};

NormalModeSetup normal_mode_setup(const Runtime& runtime);
/// Pinned, for the counts of a dispatch with exact sizes.
std::shared_ptr<HostCounts> make_host_counts(const Runtime& runtime);
/// The part of a handle that a dispatch knows before counts are exchanged.
DispatchHandle begin_handle(const DispatchArguments& arguments);

/// In the heap, where that has room for all; else outside, see CallScope::result_tensors. `fresh`: the arguments of a
/// dispatch that is not cached.
DispatchOutputs make_outputs(const ConstTensorView& x, const std::optional<ConstTensorView>& x_scales,
                             const DispatchArguments* fresh, std::int64_t rows, const CallScope& scope);

/// The same in the window of `bytes` bytes at `memory`, if it has room for rows of this shape.
std::optional<DispatchOutputs> outputs_in_window(const ConstTensorView& x,
                                                 const std::optional<ConstTensorView>& x_scales,
                                                 const DispatchArguments* fresh, std::int64_t rows,
                                                 const RowShape& shape, std::byte* memory, std::size_t bytes);

/// Waits until the kernel of an exchange has stored `counts.epoch`, which was 0. Throws what the kernel has met
/// instead.
void wait_for_counts(Runtime& runtime, const HostCounts& counts, CallScope& scope);

/// InvalidArgument for a dispatch with exact sizes that is being recorded.
void check_recording(const CallScope& scope, bool exact);

/// Memory for the sums of `tokens` tokens, rows like those of `x`, with so many weights each, handed out to the caller.
CombineResult make_sums(const ConstTensorView& x, std::int64_t tokens, std::int64_t weights, const CallScope& scope);

/// Weights of a row.
inline std::int64_t num_weights(const CombineArguments& arguments) {
  return arguments.topk_weights ? arguments.topk_weights->size(1) : 0;
}

/// Can owners read the rows where they are? InvalidArgument where they must and cannot.
bool pullable(const Runtime& runtime, const CombineArguments& arguments);

}  // namespace deep_ep
