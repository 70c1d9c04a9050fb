// A rank that signals and cells are sent to over NVLink.
#pragma once

#include "kernels/primitives/cell.hpp"
#include "kernels/primitives/memory.hpp"

namespace deep_ep::device {

struct Peer {
  std::byte* heap;  ///< as this rank maps it

  /// Stores `value` to the word at `offset`, releasing what this thread wrote before.
  DEEP_EP_DEVICE void signal(std::size_t offset, std::uint64_t value) const {
    store_release<Scope::system>(reinterpret_cast<std::uint64_t*>(heap + offset), value);
  }

  /// Stores the cell at `offset`.
  DEEP_EP_DEVICE void put_cell(std::size_t offset, std::uint64_t payload, std::uint64_t epoch) const {
    store_cell(reinterpret_cast<Cell*>(heap + offset), payload, epoch);
  }
};

}  // namespace deep_ep::device
