#include "python/bindings/handed_out.hpp"

#include <exception>
#include <utility>
#include <vector>

#include "python/bindings/executors.hpp"

namespace deep_ep::bindings {
namespace {

/// The stream on which a program drops a tensor is often one that used it.
void record_current_stream(const Tensor& tensor, CurrentStream current_stream) noexcept {
  const deep_ep::Device device = tensor.view().device;
  if (device.kind != deep_ep::Device::Kind::cuda || current_stream == nullptr) return;
  try {
    void* stream = nullptr;
    if (current_stream(dlpack::kCuda, device.index, &stream) == 0 &&
        !gpu_executor(device.index)->is_capturing(stream)) {
      tensor.record_stream(stream);
    }
  } catch (const std::exception&) {
    // At exit the driver may be gone; the memory goes with it.
  }
}

/// Of the memory from the first element to the last one.
std::size_t bytes_of(const TensorView& view) {
  std::int64_t elements = 1;
  for (int dim = 0; dim < view.dims; ++dim) {
    if (view.size(dim) == 0) return 0;
    elements += (view.size(dim) - 1) * view.stride(dim);
  }
  return static_cast<std::size_t>(elements) * size_of(view.dtype);
}

}  // namespace

HandedOut::HandedOut(const Tensor& given, CurrentStream stream, Early early)
    : tensor(given),
      shape(given.view().shape),
      strides(given.view().strides),
      current_stream(stream),
      address_(given.data()),
      bytes_(bytes_of(given.view())),
      early_(early) {
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
  HandedOutTable::instance().remove(*owner);
  if (owner->tensor.defined()) record_current_stream(owner->tensor, owner->current_stream);
}

HandedOutTable& HandedOutTable::instance() {
  static auto* table = new HandedOutTable;  // tensors end after static objects
  return *table;
}

void HandedOutTable::add(HandedOut& handed_out) {
  const std::lock_guard lock(mutex_);
  HandedOut*& first = bucket(handed_out.address_);
  handed_out.next_ = std::exchange(first, &handed_out);
}

void HandedOutTable::remove(HandedOut& handed_out) noexcept {
  const std::lock_guard lock(mutex_);
  for (HandedOut** at = &bucket(handed_out.address_); *at != nullptr; at = &(*at)->next_) {
    if (*at != &handed_out) continue;
    *at = handed_out.next_;
    return;
  }
}

bool HandedOutTable::record_stream(const void* address, StreamHandle stream) {
  const std::lock_guard lock(mutex_);
  bool found = false;
  for (HandedOut* at = bucket(address); at != nullptr; at = at->next_) {
    if (at->address_ != address) continue;
    at->tensor.record_stream(stream);
    found = true;
  }
  return found;
}

bool HandedOutTable::contains(const void* address, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  for (const HandedOut* at = bucket(address); at != nullptr; at = at->next_) {
    if (at->lies_at(address, bytes)) return true;
  }
  return false;
}

bool HandedOutTable::free(const void* address, std::size_t bytes) {
  std::vector<std::pair<Tensor, CurrentStream>> freed;  // which end without the lock
  {
    const std::lock_guard lock(mutex_);
    for (HandedOut* at = bucket(address); at != nullptr; at = at->next_) {
      if (!at->lies_at(address, bytes) || at->early_ == Early::kept) continue;
      freed.emplace_back(std::exchange(at->tensor, {}), at->current_stream);
    }
  }
  for (const auto& [tensor, current_stream] : freed) record_current_stream(tensor, current_stream);
  return !freed.empty();
}

}  // namespace deep_ep::bindings
