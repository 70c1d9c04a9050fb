// The handle of a low-latency dispatch as Python sees it: (src_info, layout_range, M, H, E).
#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <memory>
#include <optional>
#include <unordered_map>

#include "deep_ep/buffer.hpp"

namespace deep_ep::bindings {

namespace py = pybind11;

/// Combine needs more than the five elements say. Programs take the tuple apart and build others from its elements, so
/// the rest hangs on src_info: its memory keeps the whole handle, which is found again by the memory's address.
///
/// Few programs look at the two tensors, and to hand them out takes longer than most of a call. So the tuple is of a
/// class derived from Python's: the first of its methods that sees elements makes the tensors.
class LowLatencyHandles {
 public:
  /// `stream`: the caller's. The handle's memory is not recorded for it before the tensors are made.
  py::object hand_out(const LowLatencyHandle& handle, StreamHandle stream);
  /// InvalidArgument if `handle` was not made from what hand_out gave, or src_info is a copy. Its hidden size is the
  /// tuple's.
  LowLatencyHandle find(const py::tuple& handle) const;

  /// For a handle that `find` knows: the combine buffer that the program got for it last.
  void remember_combine_buffer(const py::tuple& handle, const TensorView& rows);
  std::optional<TensorView> combine_buffer(const py::tuple& handle) const;

 private:
  class Keeper;
  struct Unmade;
  static py::handle type();
  static void make_tensors(PyObject* handle);
  std::shared_ptr<Keeper> keeper(const py::tuple& handle) const;

  std::unordered_map<const void*, std::weak_ptr<Keeper>> by_address_;
  std::size_t tidy_at_ = 64;  ///< at so many entries, those of dead handles are removed
};

}  // namespace deep_ep::bindings
