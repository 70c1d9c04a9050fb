#include "deep_ep/rows.hpp"

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/row_launch.hpp"
#include "csrc/executor/backend.hpp"
#include "csrc/support/format.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep {

void sum_rows(const std::shared_ptr<Executor>& executor, const ConstTensorView& rows, const ConstTensorView& index,
              const std::optional<ConstTensorView>& bias_0, const std::optional<ConstTensorView>& bias_1,
              const TensorView& sums, StreamHandle stream) {
  const auto backend = backend_of(executor);
  const Device device = backend->device();
  check_tensor("rows", rows, device, {DType::bfloat16}, {kAnySize, kAnySize});
  check_row_bytes("rows", rows);
  check_tensor("index", index, device, {DType::int64}, {kAnySize, kAnySize});
  check_range("width of index", index.size(1), 0, SumRowsParams::kMostTerms);
  const auto check_row_for_each_sum = [&](const char* name, const ConstTensorView& tensor) {
    check_tensor(name, tensor, device, {DType::bfloat16}, {index.size(0), rows.size(1)});
    check_alignment(name, tensor);
  };
  if (bias_0) check_row_for_each_sum("bias_0", *bias_0);
  if (bias_1) check_row_for_each_sum("bias_1", *bias_1);
  check_row_for_each_sum("sums", sums);
  if (index.size(0) == 0) return;

  SumRowsParams params{};
  params.rows = rows.as<std::byte>();
  params.num_rows = rows.size(0);
  params.index = {index.data, true};
  params.index_stride = index.size(1);
  params.bias[0] = bias_0 ? bias_0->as<std::byte>() : nullptr;
  params.bias[1] = bias_1 ? bias_1->as<std::byte>() : nullptr;
  params.sums = sums.as<std::byte>();
  params.num_sums = index.size(0);
  params.terms = static_cast<int>(index.size(1));
  params.row_bytes = static_cast<std::uint32_t>(rows.size(1) * 2);
  backend->make_current();
  launch_sum_rows(*backend, params, stream);
}

}  // namespace deep_ep
