// Sums of rows within the memory of one device. Nothing here talks to other ranks, or waits for them.
#pragma once

#include <memory>
#include <optional>

#include "deep_ep/executor.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// sums[i] = bias_0[i] + bias_1[i] + rows[index[i][0]] + rows[index[i][1]] + ..., added in float32 in this order, and
/// rounded once. Without any term it is zero.
///
/// \param executor  of make_cuda_executor or make_host_executor; all tensors are on its device, and contiguous
/// \param rows      [N, H] bfloat16; H is a multiple of 8, rows begin at multiples of 16 bytes
/// \param index     [T, K] int64, K 0 to 32: rows; where it is negative, or not below N, there is no term
/// \param bias_0    [T, H] bfloat16, or nothing; the same for bias_1
/// \param sums      [T, H] bfloat16; may not overlap the others
/// \param stream    the work is enqueued there; the host does not wait
/// \throws InvalidArgument  naming the argument
void sum_rows(const std::shared_ptr<Executor>& executor, const ConstTensorView& rows, const ConstTensorView& index,
              const std::optional<ConstTensorView>& bias_0, const std::optional<ConstTensorView>& bias_1,
              const TensorView& sums, StreamHandle stream);

}  // namespace deep_ep
