#include "python/bindings/bootstrap.hpp"

#include <fmt/format.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/exchanges.hpp"
#include "python/bindings/framework.hpp"

namespace deep_ep::bindings {
namespace {

namespace py = pybind11;

/// Over a Python function, without an exchange of sizes ahead: the exchanges of buffers, the only ones over it, are
/// frames of one size.
class PythonBootstrap final : public Bootstrap {
 public:
  PythonBootstrap(int rank, int size, py::function function)
      : rank_(rank), size_(size), function_(function.release().ptr()) {}
  ~PythonBootstrap() override { let_go(function_); }
  PythonBootstrap(const PythonBootstrap&) = delete;
  PythonBootstrap& operator=(const PythonBootstrap&) = delete;

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::vector<std::byte> all_gather(std::span<const std::byte> mine) override {
    const py::gil_scoped_acquire gil;
    const py::bytes message(reinterpret_cast<const char*>(mine.data()), mine.size());
    const py::object gathered = py::handle(function_)(message);
    std::vector<std::byte> all;
    for (const py::handle item : gathered) {
      const auto theirs = py::cast<std::string>(item);
      if (theirs.size() != mine.size()) {
        throw RankMismatch(
            fmt::format("Buffer: this rank sent {} bytes to its peers and got {} from one: do all ranks "
                        "use the same version?",
                        mine.size(), theirs.size()));
      }
      const auto bytes = std::as_bytes(std::span(theirs));
      all.insert(all.end(), bytes.begin(), bytes.end());
    }
    const std::size_t wanted = mine.size() * static_cast<std::size_t>(size_);
    if (all.size() != wanted) {
      throw Error(fmt::format("the all-gather of the group returned {} bytes of {}", all.size(), wanted));
    }
    return all;
  }

 private:
  int rank_;
  int size_;
  PyObject* function_;
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
      .def(py::init([](int rank, int num_ranks, py::function gather) -> std::shared_ptr<Bootstrap> {
             return std::make_shared<PythonBootstrap>(rank, num_ranks, std::move(gather));
           }),
           "__init__(self, rank: int, num_ranks: int, all_gather: Callable[[bytes], Sequence[bytes]], /) -> None")
      .def("for_buffer", &make_buffer_exchanges,
           "for_buffer(self) -> Bootstrap\n\n"
           "For one buffer that is to be made: what ranks exchange through it carries the buffer's number.")
      .def("all_gather", &all_gather, "all_gather(self, mine: bytes, /) -> List[bytes]");
}

}  // namespace deep_ep::bindings
