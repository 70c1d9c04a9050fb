// The part of deep_ep._native that deep_ep/low_latency.py calls.
#include <pybind11/pybind11.h>

#include <memory>

#include "deep_ep/buffer.hpp"
#include "python/bindings/native_buffer.hpp"

namespace deep_ep::bindings {

using namespace py::literals;

void define_low_latency(py::module_& module, py::class_<NativeBuffer, std::shared_ptr<NativeBuffer>>& buffer) {
  py::class_<ReceiveHook>(module, "ReceiveHook", "Enqueues the receive part of a low-latency call. Call it once.")
      .def("__call__", &ReceiveHook::call);
  module.def("low_latency_bytes_hint", &Buffer::low_latency_bytes_hint, "max_tokens"_a, "hidden"_a, "num_ranks"_a,
             "num_experts"_a);
  buffer
      .def(
          "low_latency_dispatch",
          [](NativeBuffer& self, py::handle x, py::handle topk_idx, py::handle topk_weights, int max_tokens,
             int num_experts, py::handle cumulative_local_expert_recv_stats, py::handle wait_recv_cost_stats,
             bool use_fp8, bool round_scale, bool use_ue8m0, bool rank_major, bool async_finish,
             bool return_recv_hook) {
            return self.low_latency_dispatch(
                x, topk_idx, topk_weights, max_tokens, num_experts, cumulative_local_expert_recv_stats,
                wait_recv_cost_stats, {use_fp8, round_scale, use_ue8m0, rank_major}, {async_finish, return_recv_hook});
          },
          "x"_a, "topk_idx"_a, "topk_weights"_a, "max_tokens"_a, "num_experts"_a,
          "cumulative_local_expert_recv_stats"_a, "wait_recv_cost_stats"_a, "use_fp8"_a, "round_scale"_a, "use_ue8m0"_a,
          "rank_major"_a, "async_finish"_a, "return_recv_hook"_a)
      .def(
          "low_latency_combine",
          [](NativeBuffer& self, py::handle x, py::handle topk_idx, py::handle topk_weights, const py::tuple& handle,
             bool use_logfmt, bool zero_copy, py::handle out, py::handle wait_recv_cost_stats, bool async_finish,
             bool return_recv_hook) {
            return self.low_latency_combine(x, topk_idx, topk_weights, handle, use_logfmt, zero_copy, out,
                                            wait_recv_cost_stats, {async_finish, return_recv_hook});
          },
          "x"_a, "topk_idx"_a, "topk_weights"_a, "handle"_a, "use_logfmt"_a, "zero_copy"_a, "out"_a,
          "wait_recv_cost_stats"_a, "async_finish"_a, "return_recv_hook"_a)
      .def("low_latency_combine_buffer", &NativeBuffer::low_latency_combine_buffer, "handle"_a)
      .def("low_latency_memory", &NativeBuffer::low_latency_memory)
      .def("low_latency_clean", &NativeBuffer::low_latency_clean)
      .def("low_latency_update_mask", &NativeBuffer::low_latency_update_mask, "rank"_a, "masked"_a)
      .def("low_latency_query_mask", &NativeBuffer::low_latency_query_mask, "mask_status"_a)
      .def("low_latency_clear_mask", &NativeBuffer::low_latency_clear_mask)
      .def("low_latency_resume", &NativeBuffer::low_latency_resume);
}

}  // namespace deep_ep::bindings
