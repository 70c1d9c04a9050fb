// Where parts of memory lie. The same code gives sizes on the host and addresses in a kernel.
#pragma once

#include <cstddef>

#include "kernels/common/limits.hpp"

namespace deep_ep {

/// Where a thing lies in every rank's heap: an offset that knows its type. The heaps of all ranks have the same layout,
/// so one place is an address in each of them; RDMA names it by its offset.
template <class T>
struct Place {
  std::size_t offset;

  DEEP_EP_HOST_DEVICE T* in(std::byte* heap) const { return reinterpret_cast<T*>(heap + offset); }
};

/// Lays parts of memory out one after the other, from an address as aligned as any of them. A layout struct begins with
/// a Carver, and takes each part where it declares it.
class Carver {
 public:
  DEEP_EP_HOST_DEVICE constexpr explicit Carver(std::byte* memory) : memory_(memory) {}
  /// For sizes and offsets alone: what take() returns must not be used.
  DEEP_EP_HOST_DEVICE static Carver without_memory() { return Carver(reinterpret_cast<std::byte*>(std::size_t{1024})); }

  /// Room for `count` objects, as an offset.
  template <class T>
  DEEP_EP_HOST_DEVICE constexpr std::size_t place(std::size_t count = 1, std::size_t alignment = alignof(T)) {
    const std::size_t at = align_up(end_, alignment);
    end_ = at + count * sizeof(T);
    return at;
  }
  /// The same as an address.
  template <class T>
  DEEP_EP_HOST_DEVICE T* take(std::size_t count = 1, std::size_t alignment = alignof(T)) {
    return reinterpret_cast<T*>(memory_ + place<T>(count, alignment));
  }
  DEEP_EP_HOST_DEVICE constexpr std::size_t bytes() const { return end_; }

 private:
  std::byte* memory_;
  std::size_t end_ = 0;
};

}  // namespace deep_ep
