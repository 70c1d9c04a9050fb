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
class LowLatencyHandles {
 public:
  py::tuple hand_out(const LowLatencyHandle& handle);
  /// InvalidArgument if `handle` was not made from what hand_out gave, or src_info is a copy. Its hidden size is the
  /// tuple's.
  LowLatencyHandle find(const py::tuple& handle) const;

  /// For a handle that `find` knows: the combine buffer that the program got for it last.
  void remember_combine_buffer(const py::tuple& handle, const TensorView& rows);
  std::optional<TensorView> combine_buffer(const py::tuple& handle) const;

 private:
  class Keeper;
  std::shared_ptr<Keeper> keeper(const py::tuple& handle) const;

  std::unordered_map<const void*, std::weak_ptr<Keeper>> by_address_;
  std::size_t tidy_at_ = 64;  ///< at so many entries, those of dead handles are removed
};

}  // namespace deep_ep::bindings
