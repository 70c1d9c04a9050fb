// A cell: eight bytes of payload and the epoch they belong to, stored and loaded as one. Whoever sees the epoch has the
// payload, so small messages between ranks need no fence and no second word: one store, one trip over the wire.
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
  store_pair(&cell->payload, payload, epoch);
}

/// The payload belongs to the epoch that is returned with it.
DEEP_EP_DEVICE Cell load_cell(const Cell* cell) {
  Cell seen;
  load_pair(&cell->payload, seen.payload, seen.epoch);
  return seen;
}

}  // namespace device
}  // namespace deep_ep
