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

void gather_rows(const std::shared_ptr<Executor>& executor, const ConstTensorView& rows, const ConstTensorView& index,
                 const TensorView& gathered, StreamHandle stream) {
  const auto backend = backend_of(executor);
  const Device device = backend->device();
  check_tensor("index", index, device, {DType::int64}, {kAnySize});
  if (rows.dims == 0 || gathered.dims != rows.dims || gathered.dtype != rows.dtype) {
    fail<InvalidArgument>("gathered is {}, allowed: the dtype and dimensions of rows, which are {}",
                          gathered.describe(), rows.describe());
  }
  std::int64_t elements = 1;
  for (int dim = 1; dim < rows.dims; ++dim) {
    if (gathered.size(dim) != rows.size(dim)) {
      fail<InvalidArgument>("gathered is {}, allowed: rows like those of {}", gathered.describe(), rows.describe());
    }
    elements *= rows.size(dim);
  }
  if (gathered.size(0) != index.size(0)) {
    fail<InvalidArgument>("gathered has {} rows, allowed: the {} of index", gathered.size(0), index.size(0));
  }
  const auto check_rows = [&](const char* name, const ConstTensorView& tensor) {
    if (tensor.device != device) {
      fail<InvalidArgument>("{} lies on {}, the executor's device is {}", name, to_string(tensor.device),
                            to_string(device));
    }
    if (!tensor.is_contiguous()) {
      fail<InvalidArgument>("{} is {}, it must be contiguous (row-major)", name, tensor.describe());
    }
    if (tensor.data == nullptr && tensor.elements() != 0) fail<InvalidArgument>("{} has no data", name);
  };
  check_rows("rows", rows);
  check_rows("gathered", gathered);
  const std::int64_t row_bytes = elements * static_cast<std::int64_t>(size_of(rows.dtype));
  const auto all =
      reinterpret_cast<std::uintptr_t>(rows.data) | reinterpret_cast<std::uintptr_t>(gathered.data) | row_bytes;
  if (all % 4 != 0 || row_bytes >= std::int64_t{1} << 31) {
    fail<InvalidArgument>(
        "rows is {}: rows of {} bytes at {}, gathered at {}, allowed: multiples of 4 bytes below 2^31", rows.describe(),
        row_bytes, rows.data, gathered.data);
  }
  if (index.size(0) == 0 || row_bytes == 0) return;

  GatherRowsParams params{};
  params.rows = rows.as<std::byte>();
  params.index = index.as<std::int64_t>();
  params.gathered = gathered.as<std::byte>();
  params.num_rows = rows.size(0);
  params.num_gathered = index.size(0);
  params.row_bytes = static_cast<std::uint32_t>(row_bytes);
  params.unit_bytes = all % 16 == 0 ? 16 : 4;
  backend->make_current();
  backend->kernels().gather_rows(
      params, shape_for_warps(params.num_gathered, backend->policy(), kernels::gather_rows::kMaxThreads), stream);
}

}  // namespace deep_ep
