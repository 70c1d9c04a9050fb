// A Buffer with Python objects as arguments. deep_ep/buffer.py puts the documented interface on top.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>

#include "deep_ep/buffer.hpp"
#include "python/bindings/event.hpp"
#include "python/bindings/low_latency_handle.hpp"
#include "python/bindings/low_latency_hook.hpp"

namespace deep_ep::bindings {

namespace py = pybind11;

/// What every communication call takes.
struct CallArguments {
  py::handle previous_event;  ///< None or an Event
  bool async_finish = false;
};

/// How a low-latency call ends: its results wait for the call, for the event, or for the hook.
struct LowLatencyEnd {
  bool async_finish = false;
  bool return_recv_hook = false;
};

struct LowLatencyRowFormat {
  bool use_fp8 = true;
  bool round_scale = false;
  bool use_ue8m0 = false;
  bool rank_major = false;
};

class NativeBuffer : public std::enable_shared_from_this<NativeBuffer> {
 public:
  /// Collective. `all_gather(bytes) -> list of bytes`, one for each rank. `device`: a GPU's ordinal, -1 for the CPU.
  /// `comm_stream`: a stream of the framework, which lives as long as the process; 0 on the CPU.
  NativeBuffer(int rank, int num_ranks, const py::object& all_gather, int device, std::size_t heap_bytes,
               std::uintptr_t comm_stream, std::size_t low_latency_bytes, bool low_latency_masking,
               bool allow_nvlink_for_low_latency);
  ~NativeBuffer();
  NativeBuffer(const NativeBuffer&) = delete;
  NativeBuffer& operator=(const NativeBuffer&) = delete;

  /// (num_tokens_per_rank, num_tokens_per_expert, is_token_in_rank, event or None)
  py::tuple get_dispatch_layout(py::handle topk_idx, int num_experts, const CallArguments& call);

  /// (recv_x, recv_scales, recv_topk_idx, recv_topk_weights, counts per expert, handle, event); what there is not is
  /// None. The handle is a tuple of tensors, see deep_ep/buffer.py.
  py::tuple dispatch(py::handle x, py::handle x_scales, py::handle num_tokens_per_rank, py::handle is_token_in_rank,
                     py::handle num_tokens_per_expert, py::handle topk_idx, py::handle topk_weights,
                     int expert_alignment, std::int64_t num_worst_tokens, int num_sms, const CallArguments& call);
  /// (recv_x, recv_scales, event)
  py::tuple cached_dispatch(py::handle x, py::handle x_scales, const py::tuple& handle, int num_sms,
                            const CallArguments& call);
  /// (combined_x, combined_topk_weights, event)
  py::tuple combine(py::handle x, const py::tuple& handle, py::handle topk_weights, py::handle bias_0,
                    py::handle bias_1, int num_sms, const CallArguments& call);

  /// (rows or (rows, scales), recv_count, recv_topk_idx, recv_topk_weights, handle, event, hook); what there is not is
  /// None. See deep_ep/low_latency.py.
  py::tuple low_latency_dispatch(py::handle x, py::handle topk_idx, py::handle topk_weights, int max_tokens,
                                 int num_experts, py::handle cumulative_local_expert_recv_stats,
                                 py::handle wait_recv_cost_stats, const LowLatencyRowFormat& format,
                                 const LowLatencyEnd& end);
  /// (combined_x, event, hook)
  py::tuple low_latency_combine(py::handle x, py::handle topk_idx, py::handle topk_weights, const py::tuple& handle,
                                bool use_logfmt, bool zero_copy, py::handle out, py::handle wait_recv_cost_stats,
                                const LowLatencyEnd& end);
  /// A tensor over the memory that combine reads with zero_copy.
  py::object low_latency_combine_buffer(const py::tuple& handle);
  void low_latency_clean();
  void low_latency_update_mask(int rank, bool masked);
  void low_latency_query_mask(py::handle mask_status);
  void low_latency_clear_mask();
  /// Collective; the host waits.
  void low_latency_resume();

  /// A tensor over the symmetric heap of this rank; `dtype` uint8. Its memory ends with the buffer.
  py::object local_memory() const;
  /// The same over the memory of low-latency calls.
  py::object low_latency_memory() const;
  /// Waits for the GPU work of this buffer, and raises what it met.
  void check();
  /// Collective.
  void destroy();
  /// Frees without talking to peers.
  void drop();

 private:
  Buffer& alive() const;
  CallOptions options(const CallArguments& call) const;
  CallOptions low_latency_options(const LowLatencyEnd& end) const;
  DispatchHandle borrow_handle(const py::tuple& handle) const;
  py::object event_object(const CallArguments& call, EventHandle event,
                          std::initializer_list<const Tensor*> results) const;
  /// Runs `work` so that other Python threads go on, also when the library waits for a peer. On the CPU the results are
  /// ready afterwards.
  template <class Work>
  auto without_gil(Work&& work);
  /// On the CPU: waits for what a low-latency call enqueued, and raises what it met.
  void complete_on_cpu();
  /// None without `receive`. `needed`: objects of the caller that it uses.
  template <class... Objects>
  py::object hook_object(std::function<void()> receive, const Objects&... needed);
  /// A tensor of memory that ends with the buffer.
  static py::object lend(const TensorView& view);

  Device device_;
  std::shared_ptr<Executor> executor_;
  std::unique_ptr<Buffer> buffer_;
  LowLatencyHandles handles_;
};

}  // namespace deep_ep::bindings
