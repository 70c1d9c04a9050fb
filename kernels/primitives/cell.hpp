// A cell: eight bytes of payload and the epoch they belong to, stored and loaded as one. A thread that sees the epoch
// has the payload, so small messages between ranks need no fence and no second word: one store, one trip over the wire.
//
// A cell has one writer. It may be written again only when the reader is known to be done with the epoch before.
#pragma once

#include "kernels/primitives/memory.hpp"

namespace deep_ep {

struct alignas(16) Cell {
  std::uint64_t payload;
  std::uint64_t epoch;
};

namespace device {

/// At system scope, into a peer's memory too. Orders nothing but the cell itself.
DEEP_EP_DEVICE void store_cell(Cell* cell, std::uint64_t payload, std::uint64_t epoch) {
#if DEEP_EP_TARGET_CUDA
  asm volatile("{\n.reg .b128 both;\nmov.b128 both, {%1, %2};\nst.relaxed.sys.global.b128 [%0], both;\n}" ::"l"(cell),
               "l"(payload), "l"(epoch)
               : "memory");
#else
  store_relaxed<Scope::system>(&cell->payload, payload);
  store_release<Scope::system>(&cell->epoch, epoch);
#endif
}

/// The payload belongs to the epoch that is returned with it.
DEEP_EP_DEVICE Cell load_cell(const Cell* cell) {
  Cell seen;
#if DEEP_EP_TARGET_CUDA
  asm volatile("{\n.reg .b128 both;\nld.relaxed.sys.global.b128 both, [%2];\nmov.b128 {%0, %1}, both;\n}"
               : "=l"(seen.payload), "=l"(seen.epoch)
               : "l"(cell)
               : "memory");
#else
  seen.epoch = load_acquire<Scope::system>(&cell->epoch);
  seen.payload = load_relaxed<Scope::system>(&cell->payload);
#endif
  return seen;
}

}  // namespace device
}  // namespace deep_ep
