// Where a thing lies in every rank's heap.
#pragma once

#include <cstddef>

#include "kernels/primitives/target.hpp"

namespace deep_ep {

/// An offset that knows its type. The heaps of all ranks have the same layout, so one place is an address in each of
/// them; RDMA names it by its offset.
template <class T>
struct Place {
  std::size_t offset;

  DEEP_EP_HOST_DEVICE T* in(std::byte* heap) const { return reinterpret_cast<T*>(heap + offset); }
};

}  // namespace deep_ep
