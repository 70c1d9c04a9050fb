// deep_ep._native: what deep_ep/buffer.py and deep_ep/low_latency.py call. Docstrings begin with the signature, of
// which scripts/native_stub makes deep_ep/_native.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>  // ranks are a list of numbers

#include <exception>
#include <memory>
#include <string>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/environment.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "deep_ep/version.hpp"
#include "python/bindings/arguments.hpp"
#include "python/bindings/bootstrap.hpp"
#include "python/bindings/framework.hpp"
#include "python/bindings/native_buffer.hpp"

namespace deep_ep::bindings {
namespace {

using BufferClass = py::class_<NativeBuffer, std::shared_ptr<NativeBuffer>>;

/// The arguments of a call, read from what Python gives.
template <class Call>
Call read_call(const char* name, const py::args& given) {
  Call call;
  ArgumentReader reader(name, given);
  call.list(reader);
  reader.finish();
  if constexpr (requires { call.given; }) call.given = given;
  return call;
}

/// A method whose arguments a Call lists.
template <class Result, class Call>
void define_call(BufferClass& buffer, const char* name, Result (NativeBuffer::*method)(Call&)) {
  buffer.def(
      name,
      [name, method](NativeBuffer& self, const py::args& given) {
        Call call = read_call<Call>(name, given);
        return (self.*method)(call);
      },
      signature_of_call<Call>(name, Call::kReturns).c_str());
}

/// Any other method.
template <class Result, class... Parameters>
void define(BufferClass& buffer, const char* name, Result (NativeBuffer::*method)(Parameters...),
            std::initializer_list<const char*> names = {}) {
  buffer.def(name, method, signature_of<Result, Parameters...>(name, names, true).c_str());
}
/// A method of the library, which may take its time.
template <auto method, class... Parameters>
void define(BufferClass& buffer, const char* name, std::initializer_list<const char*> names = {}) {
  const auto call = [](NativeBuffer& self, Parameters... given) {
    Buffer& alive = self.alive();
    return self.without_gil([&] { return (alive.*method)(given...); });
  };
  using Result = std::invoke_result_t<decltype(call), NativeBuffer&, Parameters...>;
  buffer.def(name, call, signature_of<Result, Parameters...>(name, names, true).c_str());
}
/// One that works on the current stream.
template <auto method, class... Parameters>
void define_on_stream(BufferClass& buffer, const char* name, std::initializer_list<const char*> names = {}) {
  const auto call = [](NativeBuffer& self, Parameters... given) {
    self.on_current_stream([&](Buffer& alive, StreamHandle stream) { (alive.*method)(given..., stream); });
  };
  buffer.def(name, call, signature_of<void, Parameters...>(name, names, true).c_str());
}

template <class Result, class... Parameters>
void define(py::module_& module, const char* name, Result (*function)(Parameters...),
            std::initializer_list<const char*> names) {
  module.def(name, function, signature_of<Result, Parameters...>(name, names, false).c_str());
}

/// The library's table of environment variables is the one place that reads them, for Python as well.
std::uint64_t environment_number(const std::string& name) { return deep_ep::environment_number(name); }
std::string environment_text(const std::string& name) { return deep_ep::environment_text(name); }

bool use_exchange_api(bool use) { return Framework::instance().use_exchange_api(use); }

/// The library's exceptions as those of deep_ep/errors.py.
void register_errors() {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    const auto raise = [](const char* name, const std::exception& error) {
      const py::object type = py::module_::import("deep_ep.errors").attr(name);
      PyErr_SetString(type.ptr(), error.what());
    };
    try {
      std::rethrow_exception(pointer);
    } catch (const RankMismatch& error) {
      raise("RankMismatch", error);
    } catch (const Unsupported& error) {
      raise("Unsupported", error);
    } catch (const InvalidArgument& error) {
      raise("InvalidArgument", error);
    } catch (const OutOfMemory& error) {
      raise("OutOfMemory", error);
    } catch (const TimeoutError& error) {
      raise("PeerTimeout", error);
    } catch (const UseAfterDestroy& error) {
      raise("UseAfterDestroy", error);
    } catch (const Error& error) {
      raise("Error", error);
    }
  });
}

void define_events(py::module_& module) {
  py::class_<Event>(
      module, "EventHandle",
      "A point in the work of a CUDA stream: all that is enqueued on the current stream at construction.\n\n"
      "Copyable; can be waited for any number of times. Without CUDA there is nothing to wait for.")
      .def(py::init(&Event::of_current_stream), "__init__(self) -> None")
      .def("current_stream_wait", &Event::wait_on_current_stream,
           "current_stream_wait(self) -> None\n\n"
           "Makes the stream that is current now wait for this point. The host does not wait.")
      .def(
          "__copy__", [](const Event& event) { return event; }, "__copy__(self) -> EventHandle")
      .def(
          "__deepcopy__", [](const Event& event, const py::dict&) { return event; },
          "__deepcopy__(self, memo: Any, /) -> EventHandle");
  py::class_<ReceiveHook>(module, "ReceiveHook", "Enqueues the receive part of a low-latency call. Call it once.")
      .def("__call__", &ReceiveHook::call, "__call__(self) -> None");
}

void define_buffer(py::module_& module) {
  BufferClass buffer(module, "Buffer", "What deep_ep.Buffer is made of.");
  buffer.def(py::init([](const py::args& given) {
               return std::make_shared<NativeBuffer>(read_call<BufferSetup>("Buffer", given));
             }),
             signature_of_call<BufferSetup>("__init__", "None").c_str());
  define(buffer, "num_nodes", &NativeBuffer::num_nodes);
  define(buffer, "describe", &NativeBuffer::describe);
  define(buffer, "metrics", &NativeBuffer::metrics);
  define_call(buffer, "get_dispatch_layout", &NativeBuffer::get_dispatch_layout);
  define_call(buffer, "dispatch", &NativeBuffer::dispatch);
  define_call(buffer, "combine", &NativeBuffer::combine);
  define_call(buffer, "dispatch_elastic", &NativeBuffer::dispatch_elastic);
  define_call(buffer, "combine_elastic", &NativeBuffer::combine_elastic);
  define(buffer, "barrier", &NativeBuffer::barrier, {"async_finish"});
  define(buffer, "allocate_lb_storage", &NativeBuffer::allocate_lb_storage, {"bytes"});
  buffer.def_property_readonly("lb_storage", &NativeBuffer::lb_storage);
  define_call(buffer, "prefetch_weights", &NativeBuffer::prefetch_weights);
  define_call(buffer, "reduce_grads", &NativeBuffer::reduce_grads);
  define(buffer, "local_memory", &NativeBuffer::local_memory);
  define<&Buffer::check, bool>(buffer, "check", {"wait"});
  define<&Buffer::suspend>(buffer, "suspend");
  define<&Buffer::resume>(buffer, "resume");
  define(buffer, "destroy", &NativeBuffer::destroy);
  define(buffer, "drop", &NativeBuffer::drop);

  define_call(buffer, "low_latency_dispatch", &NativeBuffer::low_latency_dispatch);
  define_call(buffer, "low_latency_combine", &NativeBuffer::low_latency_combine);
  define(buffer, "low_latency_combine_buffer", &NativeBuffer::low_latency_combine_buffer, {"handle"});
  define(buffer, "low_latency_memory", &NativeBuffer::low_latency_memory);
  define_on_stream<&Buffer::low_latency_clean>(buffer, "low_latency_clean");
  define_on_stream<&Buffer::low_latency_update_mask, int, bool>(buffer, "low_latency_update_mask", {"rank", "masked"});
  define(buffer, "low_latency_query_mask", &NativeBuffer::low_latency_query_mask, {"mask_status"});
  define_on_stream<&Buffer::low_latency_clear_mask>(buffer, "low_latency_clear_mask");
  define<&Buffer::low_latency_resume>(buffer, "low_latency_resume");
  define(buffer, "replace_ranks", &NativeBuffer::replace_ranks, {"group", "ranks"});
}

}  // namespace
}  // namespace deep_ep::bindings

PYBIND11_MODULE(_native, module) {
  using namespace deep_ep::bindings;
  py::options options;
  options.disable_function_signatures();  // ours say more
  register_errors();
  module.attr("version") = DEEP_EP_VERSION;
  module.attr("has_cuda") = DEEP_EP_HAVE_CUDA != 0;
  define(module, "environment_number", &environment_number, {"name"});
  define(module, "environment_text", &environment_text, {"name"});
  define(module, "gpu_address", &deep_ep::cuda_device_pci_address, {"ordinal"});
  define(module, "use_exchange_api", &use_exchange_api, {"use"});
  module.attr("max_topk") = deep_ep::Buffer::kMaxTopk;
  define(module, "heap_bytes_hint", &deep_ep::Buffer::heap_bytes_hint,
         {"num_ranks", "tokens", "row_bytes", "num_topk", "scale_bytes"});
  define(module, "heap_bytes_for", &deep_ep::Buffer::heap_bytes_for, {"num_ranks", "bytes"});
  define(module, "low_latency_bytes_hint", &deep_ep::Buffer::low_latency_bytes_hint,
         {"max_tokens", "hidden", "num_ranks", "num_experts"});
  define(module, "default_timeout_s", &deep_ep::default_timeout_s, {});
  define_events(module);
  define_bootstrap(module);
  define_buffer(module);
}
