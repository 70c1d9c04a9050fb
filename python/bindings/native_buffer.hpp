// A Buffer with Python objects as arguments. deep_ep/buffer.py puts the documented interface on top.
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <functional>
#include <initializer_list>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "deep_ep/buffer.hpp"
#include "deep_ep/interrupt.hpp"
#include "python/bindings/arguments.hpp"
#include "python/bindings/framework.hpp"

namespace deep_ep::bindings {

namespace py = pybind11;

template <class Number>
py::list list_of(const std::vector<Number>& numbers) {
  py::list list;
  for (const Number number : numbers) list.append(number);
  return list;
}

// The handle of a low-latency dispatch as Python sees it: (src_info, layout_range, M, H, E).

/// Combine needs more than the five elements say. Programs take the tuple apart and build others from its elements, so
/// the rest hangs on src_info: its memory keeps the whole handle, which is found again by the memory's address.
class LowLatencyHandles {
 public:
  /// The memory of src_info, as the framework holds it.
  struct Keeper;
  struct Found {
    std::shared_ptr<Keeper> keeper;
    LowLatencyHandle handle;  ///< with the hidden size that the tuple says
  };

  py::tuple hand_out(const LowLatencyHandle& handle);
  /// InvalidArgument if `handle` was not made from what hand_out gave, or src_info is a copy.
  Found find(const py::tuple& handle) const;

 private:
  std::unordered_map<const void*, std::weak_ptr<Keeper>> by_address_;
  std::size_t tidy_at_ = 64;  ///< at so many entries, those of dead handles are removed
};

class NativeBuffer : public std::enable_shared_from_this<NativeBuffer> {
 public:
  /// Collective.
  explicit NativeBuffer(const BufferSetup& setup);
  ~NativeBuffer();
  NativeBuffer(const NativeBuffer&) = delete;
  NativeBuffer& operator=(const NativeBuffer&) = delete;

  // Results that do not exist are None.

  int num_nodes() { return alive().num_nodes(); }
  std::string describe() { return alive().describe(); }
  /// For exporters, which may ask in a thread of their own: rank, ranks, nodes, lost_ranks, description, calls and
  /// bytes of each kind.
  py::object metrics();
  /// (num_tokens_per_rank, num_tokens_per_node, num_tokens_per_expert, is_token_in_rank, event)
  py::tuple get_dispatch_layout(LayoutCall& call);
  /// (rows or (rows, scales), recv_topk_idx, recv_topk_weights, counts per expert, handle, event), with a handle None
  /// between the first and the last. The handle is a tuple of tensors, see deep_ep/buffer.py.
  py::tuple dispatch(DispatchCall& call);
  /// (combined_x, combined_topk_weights, event)
  py::tuple combine(CombineCall& call);

  // The second interface.

  /// (rows or (rows, scales), recv_topk_idx, recv_topk_weights, counts per expert, rows of the expanded layout, handle,
  /// event). The handle is a tuple of the tensors of ElasticDispatchHandle, but that its route is a tuple by itself;
  /// None with a handle of an earlier dispatch.
  py::tuple dispatch_elastic(ElasticDispatchCall& call);
  /// (combined_x, combined_topk_weights, event). Deferred: (function, event); the function returns (combined_x,
  /// combined_topk_weights, None), and until then topk_idx and biases must live.
  py::tuple combine_elastic(ElasticCombineCall& call);
  /// On the current stream; with `async_finish` on the communication stream, and it returns an event.
  py::object barrier(bool async_finish);

  // Replicas of experts.

  /// Memory for them in the heap, once, before any other call: [bytes] uint8, the same on all ranks.
  py::object allocate_lb_storage(std::size_t bytes);
  /// The same tensor, or None. Tensors over it keep the memory alive.
  py::object lb_storage();
  /// An event.
  py::object prefetch_weights(PrefetchWeightsCall& call);
  py::object reduce_grads(ReduceGradsCall& call);

  /// (rows or (rows, scales), recv_count, handle, event, hook): see deep_ep/low_latency.py.
  py::tuple low_latency_dispatch(LowLatencyDispatchCall& call);
  /// (combined_x, event, hook)
  py::tuple low_latency_combine(LowLatencyCombineCall& call);
  /// A tensor over the memory that combine reads with zero_copy.
  py::object low_latency_combine_buffer(const py::tuple& handle);
  void low_latency_query_mask(py::handle mask_status);
  /// Collective; the host waits.
  void replace_ranks(const std::shared_ptr<Bootstrap>& group, const std::vector<int>& ranks);

  /// A tensor over the symmetric heap of this rank; `dtype` uint8. Its memory ends with the buffer.
  py::object local_memory();
  /// The same over the memory of low-latency calls.
  py::object low_latency_memory();
  /// Collective.
  void destroy();
  /// Frees without talking to peers.
  void drop();

  Buffer& alive() const;
  /// Runs `work` so that other Python threads go on, even while the library waits for a peer. On the CPU the results
  /// are ready afterwards.
  template <class Work>
  auto without_gil(Work&& work, bool settles = false);
  /// The same for what works on the current stream: on the CPU it has ended afterwards, too.
  template <class Work>
  void on_current_stream(const Work& work) {
    Buffer& buffer = alive();
    const StreamHandle stream = Framework::instance().current_stream(device_);
    on_stream([&] { work(buffer, stream); });
  }

 private:
  void end(bool with_peers);
  /// Fills in what Python does not say: the current stream.
  void complete(CallOptions& options) const;
  DispatchHandle borrow_handle(const py::tuple& handle) const;
  py::tuple hand_out(const CombineResult& result, const CallOptions& options);
  /// `kept`: results that are memory of the library, as the tables of handles are.
  py::object event_object(const CallOptions& options, EventHandle event,
                          std::initializer_list<const Tensor*> kept = {}) const {
    if (!options.async_finish) return py::none();
    return py::cast(Event(executor_, std::move(event), kept));
  }
  /// without_gil for what works on the caller's stream: on the CPU it has ended afterwards, too.
  template <class Work>
  auto on_stream(Work&& work) {
    return without_gil(std::forward<Work>(work), true);
  }
  /// On the CPU: waits for what is enqueued, or until the user interrupts it.
  void settle_on_cpu();
  /// None without `receive`.
  py::object hook_object(std::function<void()> receive);
  /// A tensor of memory that ends with the buffer.
  static py::object lend(const TensorView& view);

  Device device_;
  std::shared_ptr<Executor> executor_;
  std::shared_ptr<Leftovers> leftovers_;  ///< on the CPU
  std::unique_ptr<Buffer> buffer_;
  std::optional<Tensor> lb_storage_;
  LowLatencyHandles handles_;
  std::set<const void*> combine_buffers_;  ///< that came to the program
  /// With the GIL. Bytes: of the rows of this rank's tokens, as dispatch reads and combine writes them.
  struct CallCount {
    std::uint64_t calls = 0, bytes = 0;
    void add(std::size_t more) { ++calls, bytes += more; }
  };
  CallCount dispatches_, combines_, low_latency_dispatches_, low_latency_combines_;
};

template <class Work>
auto NativeBuffer::without_gil(Work&& work, bool settles) {
  std::optional<py::error_already_set> raised;
  const py::gil_scoped_release released;
  const InterruptScope interruptible([&] {
    if (raised) return true;
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) return false;
    raised.emplace();  // KeyboardInterrupt, or what another handler of signals raised
    return true;
  });
  const auto end = [&] {
    if (device_.kind != Device::Kind::cpu) return;
    if (settles) settle_on_cpu();
    alive().check();
    leftovers_->clear();
  };
  try {
    if constexpr (std::is_void_v<decltype(work())>) {
      work();
      end();
    } else {
      auto result = work();
      end();
      return result;
    }
  } catch (const Interrupted&) {
    if (!raised) throw;
    throw py::error_already_set(*raised);
  }
}

}  // namespace deep_ep::bindings
