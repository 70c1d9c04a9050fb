// deep_ep._native: what the modules of deep_ep call. deep_ep/_native.pyi has what programs see.
#include <fmt/format.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <exception>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/buffer.hpp"
#include "deep_ep/environment.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "deep_ep/interrupt.hpp"
#include "deep_ep/version.hpp"
#include "python/bindings/framework.hpp"

namespace deep_ep::bindings {

void define_buffer(py::module_& module);  // native_buffer.cpp

namespace {

/// Its class in deep_ep/errors.py; classes before those that they derive from.
const char* class_of(const Error& error) {
  if (dynamic_cast<const RankMismatch*>(&error) != nullptr) return "RankMismatch";
  if (dynamic_cast<const Unsupported*>(&error) != nullptr) return "Unsupported";
  if (dynamic_cast<const InvalidArgument*>(&error) != nullptr) return "InvalidArgument";
  if (dynamic_cast<const OutOfMemory*>(&error) != nullptr) return "OutOfMemory";
  if (dynamic_cast<const TimeoutError*>(&error) != nullptr) return "PeerTimeout";
  if (dynamic_cast<const UseAfterDestroy*>(&error) != nullptr) return "UseAfterDestroy";
  return "Error";
}

/// A text in the words of Python's interface.
std::string in_python(std::string text) {
  const bool low_latency = text.find("low_latency") != text.npos || text.find("low-latency") != text.npos;
  const std::pair<std::string_view, std::string_view> words[] = {
      {"low_latency.bytes", "num_rdma_bytes"},
      {"low_latency.masking", "enable_shrink (masking)"},
      {"Buffer::low_latency_bytes_hint", "Buffer.get_low_latency_rdma_size_hint"},
      {"max_tokens", low_latency ? "num_max_dispatch_tokens_per_rank" : "num_max_tokens_per_rank"}};
  const auto is_letter = [&](std::size_t at) {
    return at < text.size() && (std::isalnum(static_cast<unsigned char>(text[at])) != 0 || text[at] == '_');
  };
  for (const auto& [from, to] : words) {
    for (std::size_t at = 0; (at = text.find(from, at)) != text.npos; ++at) {
      if ((at != 0 && is_letter(at - 1)) || is_letter(at + from.size())) continue;
      text.replace(at, from.size(), to);
      at += to.size() - 1;
    }
  }
  return text;
}

void register_errors() {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
    try {
      std::rethrow_exception(pointer);
    } catch (const Error& error) {
      PyErr_SetString(py::module_::import("deep_ep.errors").attr(class_of(error)).ptr(),
                      in_python(error.what()).c_str());
    }
  });
}

void define_events(py::module_& module) {
  py::class_<Event>(
      module, "EventHandle",
      "A point in the work of a CUDA stream: all that is enqueued on the current stream at construction.\n\n"
      "Copyable; can be waited for any number of times. Without CUDA there is nothing to wait for.")
      .def(py::init(&Event::of_current_stream))
      .def("current_stream_wait", &Event::wait_on_current_stream,
           "Makes the stream that is current now wait for this point. The host does not wait.")
      .def("__copy__", [](const Event& event) { return event; })
      .def("__deepcopy__", [](const Event& event, const py::dict&) { return event; });
}

void define_bootstrap(py::module_& module) {
  py::class_<Bootstrap, std::shared_ptr<Bootstrap>>(
      module, "Bootstrap", "How the ranks of a group find each other: one object for all buffers of the group.")
      .def(py::init([](int rank, int num_ranks, py::function gather) {
        const auto all_gather = [gather = std::shared_ptr(keep(std::move(gather)))](std::span<const std::byte> mine,
                                                                                    std::span<std::byte> all) {
          const py::gil_scoped_acquire gil;
          const auto gathered = py::cast<std::string>(
              py::handle(gather.get())(py::bytes(reinterpret_cast<const char*>(mine.data()), mine.size())));
          if (gathered.size() != all.size()) {
            throw RankMismatch(
                fmt::format("the all-gather of the group returned {} bytes of {}: do all ranks use the same version?",
                            gathered.size(), all.size()));
          }
          std::ranges::copy(std::as_bytes(std::span(gathered)), all.begin());
        };
        return make_callback_bootstrap(rank, num_ranks, all_gather);
      }));
}

}  // namespace
}  // namespace deep_ep::bindings

PYBIND11_MODULE(_native, module) {
  using namespace deep_ep::bindings;
  register_errors();
  module.attr("version") = DEEP_EP_VERSION;
  // The library's table of environment variables is the one place that reads them, for Python as well.
  module.def("environment_text", &deep_ep::environment_text);
  module.def("gpu_address", &deep_ep::cuda_device_pci_address);
  module.attr("max_topk") = deep_ep::Buffer::kMaxTopk;
  module.def("heap_bytes_hint", &deep_ep::Buffer::heap_bytes_hint);
  module.def("low_latency_bytes_hint", [](int max_tokens, std::int64_t hidden, int num_ranks, int num_experts) {
    return deep_ep::Buffer::low_latency_bytes_hint(max_tokens, hidden, num_ranks, num_experts);
  });
  module.def("default_timeout_s", &deep_ep::default_timeout_s);
  // Collective. The GPU's ordinal, or -1 for the CPU.
  module.def("count_nodes", [](const std::shared_ptr<deep_ep::Bootstrap>& bootstrap, int ordinal) {
    const auto executor = ordinal < 0 ? deep_ep::make_host_executor() : gpu_executor(ordinal);
    const py::gil_scoped_release released;
    return deep_ep::Buffer::count_nodes(bootstrap, executor);
  });
  module.def("ask_whether_to_wait", [] {
    if (deep_ep::InterruptScope::wanted()) throw deep_ep::Interrupted("a wait for other ranks was interrupted");
  });
  define_events(module);
  define_bootstrap(module);
  define_buffer(module);
}
