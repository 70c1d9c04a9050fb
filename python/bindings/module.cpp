// deep_ep._native: what deep_ep/buffer.py calls. Types and signatures: deep_ep/_native.pyi.
#include <pybind11/pybind11.h>

#include "deep_ep/executor.hpp"
#include "deep_ep/version.hpp"
#include "python/bindings/errors.hpp"
#include "python/bindings/event.hpp"
#include "python/bindings/framework.hpp"
#include "python/bindings/native_buffer.hpp"

namespace py = pybind11;
using namespace py::literals;
using deep_ep::bindings::CallArguments;
using deep_ep::bindings::Event;
using deep_ep::bindings::NativeBuffer;

namespace deep_ep::bindings {

// module_low_latency.cpp
void define_low_latency(py::module_& module, py::class_<NativeBuffer, std::shared_ptr<NativeBuffer>>& buffer);

}  // namespace deep_ep::bindings

PYBIND11_MODULE(_native, module) {
  deep_ep::bindings::register_errors();
  module.attr("has_cuda") = DEEP_EP_HAVE_CUDA != 0;
  module.def(
      "use_exchange_api", [](bool use) { return deep_ep::bindings::Framework::instance().use_exchange_api(use); },
      "use"_a);

  py::class_<Event>(
      module, "EventHandle",
      "A point in the work of a CUDA stream: all that is enqueued on the current stream at construction.\n\n"
      "Copyable; can be waited for any number of times. Without CUDA there is nothing to wait for.")
      .def(py::init(&Event::of_current_stream))
      .def("current_stream_wait", &Event::wait_on_current_stream,
           "Makes the stream that is current now wait for this point. The host does not wait.")
      .def("__copy__", [](const Event& event) { return event; })
      .def(
          "__deepcopy__", [](const Event& event, const py::dict&) { return event; }, "memo"_a);

  py::class_<NativeBuffer, std::shared_ptr<NativeBuffer>> buffer(module, "Buffer");
  buffer
      .def(py::init<int, int, const py::object&, int, std::size_t, std::uintptr_t, std::size_t, bool, bool>(), "rank"_a,
           "num_ranks"_a, "all_gather"_a, "device"_a, "heap_bytes"_a, "comm_stream"_a, "low_latency_bytes"_a,
           "low_latency_masking"_a, "allow_nvlink_for_low_latency"_a)
      .def(
          "get_dispatch_layout",
          [](NativeBuffer& self, py::handle topk_idx, int num_experts, py::handle previous_event, bool async_finish) {
            return self.get_dispatch_layout(topk_idx, num_experts, {previous_event, async_finish});
          },
          "topk_idx"_a, "num_experts"_a, "previous_event"_a, "async_finish"_a)
      .def(
          "dispatch",
          [](NativeBuffer& self, py::handle x, py::handle x_scales, py::handle num_tokens_per_rank,
             py::handle is_token_in_rank, py::handle num_tokens_per_expert, py::handle topk_idx,
             py::handle topk_weights, int expert_alignment, std::int64_t num_worst_tokens, int num_sms,
             py::handle previous_event, bool async_finish) {
            return self.dispatch(x, x_scales, num_tokens_per_rank, is_token_in_rank, num_tokens_per_expert, topk_idx,
                                 topk_weights, expert_alignment, num_worst_tokens, num_sms,
                                 {previous_event, async_finish});
          },
          "x"_a, "x_scales"_a, "num_tokens_per_rank"_a, "is_token_in_rank"_a, "num_tokens_per_expert"_a, "topk_idx"_a,
          "topk_weights"_a, "expert_alignment"_a, "num_worst_tokens"_a, "num_sms"_a, "previous_event"_a,
          "async_finish"_a)
      .def(
          "cached_dispatch",
          [](NativeBuffer& self, py::handle x, py::handle x_scales, const py::tuple& handle, int num_sms,
             py::handle previous_event, bool async_finish) {
            return self.cached_dispatch(x, x_scales, handle, num_sms, {previous_event, async_finish});
          },
          "x"_a, "x_scales"_a, "handle"_a, "num_sms"_a, "previous_event"_a, "async_finish"_a)
      .def(
          "combine",
          [](NativeBuffer& self, py::handle x, const py::tuple& handle, py::handle topk_weights, py::handle bias_0,
             py::handle bias_1, int num_sms, py::handle previous_event, bool async_finish) {
            return self.combine(x, handle, topk_weights, bias_0, bias_1, num_sms, {previous_event, async_finish});
          },
          "x"_a, "handle"_a, "topk_weights"_a, "bias_0"_a, "bias_1"_a, "num_sms"_a, "previous_event"_a,
          "async_finish"_a)
      .def("local_memory", &NativeBuffer::local_memory)
      .def("check", &NativeBuffer::check)
      .def("destroy", &NativeBuffer::destroy)
      .def("drop", &NativeBuffer::drop);
  deep_ep::bindings::define_low_latency(module, buffer);
}
