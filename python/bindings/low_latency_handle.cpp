#include "python/bindings/low_latency_handle.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "deep_ep/error.hpp"
#include "python/bindings/framework.hpp"

namespace deep_ep::bindings {
namespace {

constexpr std::size_t kLength = 5;  // src_info, layout_range, M, H, E

std::int64_t number(const py::tuple& handle, std::size_t index) {
  if (!py::isinstance<py::int_>(handle[index])) {
    throw py::type_error(fmt::format("handle[{}] is of type {}, expected an int", index,
                                     Py_TYPE(py::object(handle[index]).ptr())->tp_name));
  }
  return handle[index].cast<std::int64_t>();
}

void require_same(std::size_t index, std::int64_t given, std::int64_t dispatched) {
  if (given == dispatched) return;
  throw InvalidArgument(fmt::format("handle[{}] is {}, but the dispatch had {}", index, given, dispatched));
}

}  // namespace

/// The memory of src_info, as the framework holds it.
class LowLatencyHandles::Keeper final : public Tensor::Storage {
 public:
  explicit Keeper(LowLatencyHandle handle) : handle_(std::move(handle)) {}
  /// The handle's tensors share their memory.
  void record_stream(StreamHandle stream) override { handle_.src_info.record_stream(stream); }
  bool knows_stream(StreamHandle stream) const override { return handle_.src_info.storage()->knows_stream(stream); }
  const LowLatencyHandle& handle() const { return handle_; }
  std::optional<TensorView> combine_buffer;

 private:
  LowLatencyHandle handle_;
};

py::tuple LowLatencyHandles::hand_out(const LowLatencyHandle& handle) {
  const auto keeper = std::make_shared<Keeper>(handle);
  by_address_.insert_or_assign(handle.src_info.data(), keeper);
  if (by_address_.size() > tidy_at_) {
    std::erase_if(by_address_, [](const auto& entry) { return entry.second.expired(); });
    tidy_at_ = std::max<std::size_t>(64, 2 * by_address_.size());
  }
  const Framework& framework = Framework::instance();
  return py::make_tuple(framework.hand_out(Tensor(handle.src_info.view(), keeper)),
                        framework.hand_out(handle.layout_range), handle.max_tokens, handle.hidden, handle.num_experts);
}

std::shared_ptr<LowLatencyHandles::Keeper> LowLatencyHandles::keeper(const py::tuple& handle) const {
  const auto entry = by_address_.find(Framework::instance().borrow(handle[0], "handle[0]").view.data);
  return entry == by_address_.end() ? nullptr : entry->second.lock();
}

void LowLatencyHandles::remember_combine_buffer(const py::tuple& handle, const TensorView& rows) {
  keeper(handle)->combine_buffer = rows;
}

std::optional<TensorView> LowLatencyHandles::combine_buffer(const py::tuple& handle) const {
  return keeper(handle)->combine_buffer;
}

LowLatencyHandle LowLatencyHandles::find(const py::tuple& handle) const {
  if (handle.size() != kLength) {
    throw InvalidArgument(
        fmt::format("handle has {} elements, expected the tuple of {} that low_latency_dispatch "
                    "returned",
                    handle.size(), kLength));
  }
  const std::shared_ptr<Keeper> kept = keeper(handle);
  if (!kept) {
    const TensorView src_info = Framework::instance().borrow(handle[0], "handle[0]").view;
    throw InvalidArgument(
        fmt::format("handle[0] is {}, but not the tensor that this buffer's low_latency_dispatch "
                    "returned (a copy does not do: combine needs what lies behind it)",
                    src_info.describe()));
  }
  LowLatencyHandle result = kept->handle();
  require_same(2, number(handle, 2), result.max_tokens);
  result.hidden = number(handle, 3);
  require_same(4, number(handle, 4), result.num_experts);
  return result;
}

}  // namespace deep_ep::bindings
