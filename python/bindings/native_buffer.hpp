// A Buffer with Python objects as arguments. deep_ep/buffer.py puts the documented interface on top.
#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <optional>

#include "deep_ep/buffer.hpp"
#include "python/bindings/event.hpp"

namespace deep_ep::bindings {

namespace py = pybind11;

/// What every communication call takes.
struct CallArguments {
  py::handle previous_event;  ///< None or an Event
  bool async_finish = false;
};

class NativeBuffer {
 public:
  /// Collective. `all_gather(bytes) -> list of bytes`, one for each rank. `device`: a GPU's ordinal, -1 for the CPU.
  /// `comm_stream`: a stream of the framework, which lives as long as the process; 0 on the CPU.
  NativeBuffer(int rank, int num_ranks, const py::object& all_gather, int device, std::size_t heap_bytes,
               std::uintptr_t comm_stream);
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

  /// A tensor over the symmetric heap of this rank; `dtype` uint8. Its memory ends with the buffer.
  py::object local_memory() const;
  /// Waits for the GPU work of this buffer, and raises what it met.
  void check();
  /// Collective.
  void destroy();
  /// Frees without talking to peers.
  void drop();

 private:
  Buffer& alive() const;
  CallOptions options(const CallArguments& call) const;
  DispatchHandle borrow_handle(const py::tuple& handle) const;
  py::object event_object(const CallArguments& call, EventHandle event,
                          std::initializer_list<const Tensor*> results) const;
  /// Runs `work` so that other Python threads go on, also when the library waits for a peer. On the CPU the results are
  /// ready afterwards.
  template <class Work>
  auto without_gil(Work&& work);

  Device device_;
  std::shared_ptr<Executor> executor_;
  std::unique_ptr<Buffer> buffer_;
};

}  // namespace deep_ep::bindings
