#include "python/bindings/handed_out.hpp"

#include <exception>
#include <memory>

#include "python/bindings/executors.hpp"

namespace deep_ep::bindings {
namespace {

/// The stream on which a program drops a tensor is often one that used it.
void record_current_stream(const Tensor& tensor, CurrentStream current_stream) noexcept {
  const deep_ep::Device device = tensor.view().device;
  if (device.kind != deep_ep::Device::Kind::cuda || current_stream == nullptr) return;
  try {
    void* stream = nullptr;
    if (current_stream(dlpack::kCuda, device.index, &stream) != 0 || tensor.storage()->knows_stream(stream)) return;
    if (!gpu_executor(device.index)->is_capturing(stream)) tensor.record_stream(stream);
  } catch (const std::exception&) {
    // At exit the driver may be gone; the memory goes with it.
  }
}

}  // namespace

HandedOut::HandedOut(const Tensor& given, CurrentStream stream)
    : tensor(given), shape(given.view().shape), strides(given.view().strides), current_stream(stream) {
  versioned.version = {1, 0};
  versioned.context = plain.context = this;
  versioned.deleter = [](dlpack::ManagedTensorVersioned* self) { give_back(static_cast<HandedOut*>(self->context)); };
  plain.deleter = [](dlpack::ManagedTensor* self) { give_back(static_cast<HandedOut*>(self->context)); };
}

void HandedOut::fill(dlpack::TensorInfo& info, const dlpack::DataType& dtype) {
  const TensorView& view = tensor.view();
  const bool gpu = view.device.kind == deep_ep::Device::Kind::cuda;
  info = {view.data,
          {gpu ? dlpack::kCuda : dlpack::kCpu, gpu ? view.device.index : 0},
          view.dims,
          dtype,
          shape.data(),
          strides.data(),
          0};
}

void HandedOut::give_back(HandedOut* handed_out) noexcept {
  const std::unique_ptr<HandedOut> owner(handed_out);
  record_current_stream(owner->tensor, owner->current_stream);
}

}  // namespace deep_ep::bindings
