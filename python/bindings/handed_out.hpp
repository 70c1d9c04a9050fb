// Memory of the library in the hands of the framework, which gives it back through DLPack.
#pragma once

#include <array>
#include <cstdint>

#include "deep_ep/tensor.hpp"
#include "python/bindings/dlpack.hpp"

namespace deep_ep::bindings {

/// nullptr: the framework cannot be asked without the GIL.
using CurrentStream = int (*)(dlpack::DeviceType, std::int32_t, void**);

/// A tensor of it. Its context is itself; `give_back` ends it.
struct HandedOut {
  HandedOut(const Tensor& tensor, CurrentStream current_stream);
  HandedOut(const HandedOut&) = delete;
  HandedOut& operator=(const HandedOut&) = delete;

  void fill(dlpack::TensorInfo& info, const dlpack::DataType& dtype);
  static void give_back(HandedOut* handed_out) noexcept;

  dlpack::ManagedTensorVersioned versioned{};
  dlpack::ManagedTensor plain{};
  Tensor tensor;
  std::array<std::int64_t, TensorView::kMaxDims> shape;
  std::array<std::int64_t, TensorView::kMaxDims> strides;
  CurrentStream current_stream;
};

}  // namespace deep_ep::bindings
