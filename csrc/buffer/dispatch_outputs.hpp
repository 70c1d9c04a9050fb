// What every dispatch of normal mode does on the host: room for the rows that come, and the wait for their number.
#pragma once

#include <optional>

#include "csrc/buffer/call_scope.hpp"
#include "csrc/buffer/runtime.hpp"
#include "deep_ep/buffer.hpp"
#include "kernels/common/messages.hpp"
#include "kernels/common/rows.hpp"

namespace deep_ep {

/// What a dispatch returns; undefined where it is not wanted.
struct DispatchOutputs {
  Tensor x, scales, topk_idx, topk_weights, src_idx;
  bool in_heap = true;

  RowTargets targets() const {
    return {x.as<std::byte>(), scales.as<std::uint32_t>(), topk_idx.as<std::byte>(), topk_weights.as<float>(),
            src_idx.as<std::int32_t>()};
  }
};

/// In the heap, or, when that has no room for all, in the executor's pool. `fresh`: the arguments of a dispatch that is
/// not cached.
DispatchOutputs make_outputs(const ConstTensorView& x, const std::optional<ConstTensorView>& x_scales,
                             const DispatchArguments* fresh, std::int64_t rows, const CallScope& scope);

/// Waits until the kernel of an exchange has stored `counts.epoch`, which was 0. Throws what the kernel has met instead.
void wait_for_counts(Runtime& runtime, const HostCounts& counts, CallScope& scope);

}  // namespace deep_ep
