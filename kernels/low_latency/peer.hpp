// A rank that rows are sent to. Reachable by NVLink, it takes bulk stores and flags; offsets rather than addresses, so
// that a peer behind a network card can take the same calls.
#pragma once

#include "kernels/primitives/bulk.hpp"
#include "kernels/primitives/cell.hpp"
#include "kernels/primitives/memory.hpp"

namespace deep_ep::device {

struct Peer {
  std::byte* heap;  ///< as this rank maps it

  /// Starts to store `bytes` of shared memory at `offset` of the peer's heap. The writers have published the stage and
  /// met this thread since. One group of this thread's bulk stores.
  DEEP_EP_DEVICE void put(std::size_t offset, const std::byte* stage, std::uint32_t bytes) const {
    bulk::store(heap + offset, stage, bytes);
    bulk::commit();
  }

  /// Stores `value` to the word at `offset` when all but this thread's latest `kPutsLeft` puts (to whatever peers)
  /// have landed: who acquires the value sees them.
  template <int kPutsLeft = 0>
  DEEP_EP_DEVICE void signal_after_puts(std::size_t offset, std::uint64_t value) const {
    bulk::wait<kPutsLeft>();
    bulk::raise_flag(reinterpret_cast<std::uint64_t*>(heap + offset), value);
  }

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
