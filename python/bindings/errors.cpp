#include "python/bindings/errors.hpp"

#include <pybind11/pybind11.h>

#include "deep_ep/error.hpp"

namespace deep_ep::bindings {
namespace {

namespace py = pybind11;

void raise(const char* name, const std::exception& error) {
  const py::object type = py::module_::import("deep_ep.errors").attr(name);
  PyErr_SetString(type.ptr(), error.what());
}

}  // namespace

void register_errors() {
  py::register_local_exception_translator([](std::exception_ptr pointer) {
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

}  // namespace deep_ep::bindings
