#include "python/bindings/bootstrap.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/exchanges.hpp"

namespace deep_ep::bindings {
namespace {

namespace py = pybind11;

/// A Python all-gather as the library's. The GIL is taken for the call, and to release the object.
AllGatherFunction wrap_all_gather(const py::function& all_gather) {
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

/// As it comes from Python, without an exchange of sizes ahead: the exchanges of buffers, the only ones over it, are
/// frames of one size.
class PythonBootstrap final : public Bootstrap {
 public:
  PythonBootstrap(int rank, int size, const py::function& function)
      : rank_(rank), size_(size), function_(wrap_all_gather(function)) {}
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<std::byte> all_gather(std::span<const std::byte> mine) override {
    std::vector<std::byte> all(mine.size() * static_cast<std::size_t>(size_));
    function_(mine, all);
    return all;
  }

 private:
  int rank_;
  int size_;
  AllGatherFunction function_;
};

py::list all_gather(Bootstrap& bootstrap, const py::bytes& mine) {
  const auto bytes = static_cast<std::string>(mine);
  std::vector<std::byte> all;
  {
    const py::gil_scoped_release released;
    all = bootstrap.all_gather(std::as_bytes(std::span(bytes)));
  }
  py::list gathered;
  for (std::size_t rank = 0; rank < static_cast<std::size_t>(bootstrap.size()); ++rank) {
    gathered.append(py::bytes(reinterpret_cast<const char*>(all.data()) + rank * bytes.size(), bytes.size()));
  }
  return gathered;
}

}  // namespace

void define_bootstrap(py::module_& module) {
  py::class_<Bootstrap, std::shared_ptr<Bootstrap>>(
      module, "Bootstrap", "How the ranks of a group find each other: one object for all buffers of the group.")
      .def(py::init([](int rank, int num_ranks, const py::function& gather) -> std::shared_ptr<Bootstrap> {
             return std::make_shared<PythonBootstrap>(rank, num_ranks, gather);
           }),
           "__init__(self, rank: int, num_ranks: int, all_gather: Callable[[bytes], Sequence[bytes]], /) -> None")
      .def("for_buffer", &make_buffer_exchanges,
           "for_buffer(self) -> Bootstrap\n\n"
           "For one buffer that is to be made: what ranks exchange through it carries the buffer's number.")
      .def("all_gather", &all_gather, "all_gather(self, mine: bytes, /) -> List[bytes]");
}

}  // namespace deep_ep::bindings
