#include "python/bindings/native_buffer.hpp"

#include <fmt/format.h>

#include <cstring>
#include <string>
#include <utility>

#include "python/bindings/executors.hpp"
#include "python/bindings/framework.hpp"

namespace deep_ep::bindings {
namespace {

/// Elements of the handle tuple. Those between are upstream's bookkeeping, which nothing here needs.
constexpr std::size_t kHandleLength = 6;
constexpr std::size_t kRankPrefixMatrix = 0;
constexpr std::size_t kRecvSrcIdx = 3;
constexpr std::size_t kDestinationRow = 5;

/// A Python all-gather as the library's. The GIL is taken for the call, and to let go of the object.
AllGatherFunction wrap_all_gather(const py::object& all_gather) {
  std::shared_ptr<PyObject> function(all_gather.inc_ref().ptr(), [](PyObject* object) {
    if (Py_IsInitialized() == 0) return;
    const py::gil_scoped_acquire gil;
    Py_DECREF(object);
  });
  return [function](std::span<const std::byte> mine, std::span<std::byte> all) {
    const py::gil_scoped_acquire gil;
    const py::bytes message(reinterpret_cast<const char*>(mine.data()), mine.size());
    const py::object gathered = py::handle(function.get())(message);
    std::size_t at = 0;
    for (const py::handle item : gathered) {
      const auto theirs = py::cast<std::string>(item);
      if (theirs.size() != mine.size() || at + theirs.size() > all.size()) {
        throw RankMismatch(
            fmt::format("Buffer: this rank sent {} bytes to its peers and got {} from one: do all ranks "
                        "use the same version?",
                        mine.size(), theirs.size()));
      }
      std::memcpy(all.data() + at, theirs.data(), theirs.size());
      at += theirs.size();
    }
    if (at != all.size())
      throw Error(fmt::format("the all-gather of the group returned {} bytes of {}", at, all.size()));
  };
}

/// The memory of a tensor that the caller holds. Kernels use it on the communication stream only, in whose order the
/// library's tensors are freed, and those of the framework are recorded by the caller.
class Borrowed final : public Tensor::Storage {
 public:
  void record_stream(StreamHandle) override {}
};

Tensor borrowed_tensor(const TensorView& view) {
  static const auto storage = std::make_shared<Borrowed>();
  return Tensor(view, storage);
}

TensorView handle_tensor(const py::tuple& handle, std::size_t index, const Device& device, int dims) {
  const std::string name = fmt::format("handle[{}]", index);
  const TensorView view = Framework::instance().borrow(handle[index], name.c_str()).view;
  if (view.dtype != DType::int32 || view.dims != dims || !view.is_contiguous() || view.device != device) {
    throw InvalidArgument(
        fmt::format("{} is {} on {}, expected what dispatch returned: contiguous int32 of {} "
                    "dimensions on {}",
                    name, view.describe(), to_string(view.device), dims, to_string(device)));
  }
  return view;
}

std::optional<TensorView> optional_view(py::handle object, const char* name) {
  if (const auto argument = Framework::instance().borrow_optional(object, name)) return argument->view;
  return std::nullopt;
}

}  // namespace

NativeBuffer::NativeBuffer(int rank, int num_ranks, const py::object& all_gather, int device, std::size_t heap_bytes,
                           std::uintptr_t comm_stream, std::size_t low_latency_bytes, bool low_latency_masking,
                           bool allow_nvlink_for_low_latency)
    : device_(device < 0 ? Device{} : Device{Device::Kind::cuda, device}) {
  AllGatherFunction function = wrap_all_gather(all_gather);
  BufferOptions options;
  options.heap_bytes = heap_bytes;
  options.reject_unknown_experts = false;
  options.comm_stream = reinterpret_cast<StreamHandle>(comm_stream);
  options.low_latency_bytes = low_latency_bytes;
  options.low_latency_masking = low_latency_masking;
  options.allow_nvlink_for_low_latency = allow_nvlink_for_low_latency;
  const py::gil_scoped_release released;
  executor_ = device < 0 ? make_host_executor() : gpu_executor(device);
  buffer_ = std::make_unique<Buffer>(make_callback_bootstrap(rank, num_ranks, std::move(function)), executor_, options);
}

NativeBuffer::~NativeBuffer() { drop(); }

Buffer& NativeBuffer::alive() const {
  if (!buffer_) throw UseAfterDestroy("the buffer was used after destroy");
  return *buffer_;
}

CallOptions NativeBuffer::options(const CallArguments& call) const {
  CallOptions options;
  options.stream = Framework::instance().current_stream(device_);
  options.async_finish = call.async_finish;
  if (!call.previous_event.is_none()) {
    if (!py::isinstance<Event>(call.previous_event)) {
      throw py::type_error(fmt::format("previous_event.event is of type {}, expected a deep_ep.utils.EventHandle",
                                       Py_TYPE(call.previous_event.ptr())->tp_name));
    }
    // Of the CPU: it has happened.
    if (device_.kind == Device::Kind::cuda) options.previous_event = call.previous_event.cast<const Event&>().event();
  }
  return options;
}

template <class Work>
auto NativeBuffer::without_gil(Work&& work) {
  const py::gil_scoped_release released;
  auto result = work();
  if (device_.kind == Device::Kind::cpu) buffer_->check();
  return result;
}

py::object NativeBuffer::event_object(const CallArguments& call, EventHandle event,
                                      std::initializer_list<const Tensor*> results) const {
  if (!call.async_finish) return py::none();
  return py::cast(Event(executor_, std::move(event), std::span(results.begin(), results.size())));
}

DispatchHandle NativeBuffer::borrow_handle(const py::tuple& handle) const {
  if (handle.size() != kHandleLength) {
    throw InvalidArgument(fmt::format("handle has {} elements, expected the tuple of {} that dispatch returned",
                                      handle.size(), kHandleLength));
  }
  DispatchHandle result;
  result.rank_prefix_matrix = borrowed_tensor(handle_tensor(handle, kRankPrefixMatrix, device_, 2));
  result.recv_src_idx = borrowed_tensor(handle_tensor(handle, kRecvSrcIdx, device_, 1));
  result.destination_row = borrowed_tensor(handle_tensor(handle, kDestinationRow, device_, 2));
  result.num_tokens = result.destination_row.size(0);
  result.num_recv_rows = result.recv_src_idx.size(0);
  return result;
}

py::tuple NativeBuffer::get_dispatch_layout(py::handle topk_idx, int num_experts, const CallArguments& call) {
  Buffer& buffer = alive();
  Framework& framework = Framework::instance();
  const TensorView indices = framework.borrow(topk_idx, "topk_idx").view;
  const CallOptions call_options = options(call);
  const DispatchLayout layout =
      without_gil([&] { return buffer.get_dispatch_layout(indices, num_experts, call_options); });
  return py::make_tuple(framework.hand_out(layout.num_tokens_per_rank),
                        framework.hand_out(layout.num_tokens_per_expert), framework.hand_out(layout.is_token_in_rank),
                        event_object(call, layout.event, {&layout.num_tokens_per_rank, &layout.is_token_in_rank}));
}

py::tuple NativeBuffer::dispatch(py::handle x, py::handle x_scales, py::handle num_tokens_per_rank,
                                 py::handle is_token_in_rank, py::handle num_tokens_per_expert, py::handle topk_idx,
                                 py::handle topk_weights, int expert_alignment, std::int64_t num_worst_tokens,
                                 int num_sms, const CallArguments& call) {
  Buffer& buffer = alive();
  Framework& framework = Framework::instance();
  const TensorArgument rows = framework.borrow(x, "x", Accept::any_type);
  DispatchArguments arguments;
  arguments.x = rows.view;
  arguments.x_scales = optional_view(x_scales, "x_scales");
  arguments.num_tokens_per_rank = optional_view(num_tokens_per_rank, "num_tokens_per_rank");
  arguments.is_token_in_rank = optional_view(is_token_in_rank, "is_token_in_rank");
  arguments.num_tokens_per_expert = optional_view(num_tokens_per_expert, "num_tokens_per_expert");
  arguments.topk_idx = optional_view(topk_idx, "topk_idx");
  arguments.topk_weights = optional_view(topk_weights, "topk_weights");
  arguments.expert_alignment = expert_alignment;
  arguments.num_worst_tokens = num_worst_tokens;
  arguments.config.num_sms = num_sms;
  const CallOptions call_options = options(call);
  const DispatchResult result = without_gil([&] { return buffer.dispatch(arguments, call_options); });

  const py::object prefix = framework.hand_out(result.handle.rank_prefix_matrix);
  const py::object recv_src_idx = framework.hand_out(result.handle.recv_src_idx);
  const py::object destination_row = framework.hand_out(result.handle.destination_row);
  py::list counts(result.num_recv_tokens_per_expert.size());
  for (std::size_t i = 0; i < counts.size(); ++i) counts[i] = py::int_(result.num_recv_tokens_per_expert[i]);
  const Tensor none;
  return py::make_tuple(
      framework.hand_out(result.recv_x, &rows.dtype), framework.hand_out(result.recv_x_scales),
      framework.hand_out(result.recv_topk_idx), framework.hand_out(result.recv_topk_weights), counts,
      py::make_tuple(prefix, prefix, prefix, recv_src_idx, is_token_in_rank, destination_row),
      event_object(call, result.event,
                   {&result.recv_x, result.recv_x_scales ? &*result.recv_x_scales : &none,
                    result.recv_topk_idx ? &*result.recv_topk_idx : &none,
                    result.recv_topk_weights ? &*result.recv_topk_weights : &none, &result.handle.rank_prefix_matrix}));
}

py::tuple NativeBuffer::cached_dispatch(py::handle x, py::handle x_scales, const py::tuple& handle, int num_sms,
                                        const CallArguments& call) {
  Buffer& buffer = alive();
  Framework& framework = Framework::instance();
  const TensorArgument rows = framework.borrow(x, "x", Accept::any_type);
  const DispatchHandle cached = borrow_handle(handle);
  DispatchArguments arguments;
  arguments.x = rows.view;
  arguments.x_scales = optional_view(x_scales, "x_scales");
  arguments.handle = &cached;
  arguments.config.num_sms = num_sms;
  const CallOptions call_options = options(call);
  const DispatchResult result = without_gil([&] { return buffer.dispatch(arguments, call_options); });
  const Tensor none;
  return py::make_tuple(
      framework.hand_out(result.recv_x, &rows.dtype), framework.hand_out(result.recv_x_scales),
      event_object(call, result.event, {&result.recv_x, result.recv_x_scales ? &*result.recv_x_scales : &none}));
}

py::tuple NativeBuffer::combine(py::handle x, const py::tuple& handle, py::handle topk_weights, py::handle bias_0,
                                py::handle bias_1, int num_sms, const CallArguments& call) {
  Buffer& buffer = alive();
  Framework& framework = Framework::instance();
  const DispatchHandle cached = borrow_handle(handle);
  CombineArguments arguments;
  arguments.x = framework.borrow(x, "x").view;
  arguments.handle = &cached;
  arguments.topk_weights = optional_view(topk_weights, "topk_weights");
  arguments.bias_0 = optional_view(bias_0, "bias_0");
  arguments.bias_1 = optional_view(bias_1, "bias_1");
  arguments.config.num_sms = num_sms;
  const CallOptions call_options = options(call);
  const CombineResult result = without_gil([&] { return buffer.combine(arguments, call_options); });
  const Tensor none;
  return py::make_tuple(
      framework.hand_out(result.combined_x), framework.hand_out(result.combined_topk_weights),
      event_object(call, result.event,
                   {&result.combined_x, result.combined_topk_weights ? &*result.combined_topk_weights : &none}));
}

py::object NativeBuffer::lend(const TensorView& view) { return Framework::instance().hand_out(borrowed_tensor(view)); }

py::object NativeBuffer::local_memory() const { return lend(alive().local_memory()); }

void NativeBuffer::check() {
  Buffer& buffer = alive();
  const py::gil_scoped_release released;
  buffer.check();
}

void NativeBuffer::destroy() {
  Buffer& buffer = alive();
  const py::gil_scoped_release released;
  buffer.destroy();
  buffer_.reset();
}

void NativeBuffer::drop() {
  if (!buffer_) return;
  const py::gil_scoped_release released;
  buffer_.reset();
}

}  // namespace deep_ep::bindings
