// From a work-queue entry of mlx5 format to an operation for a wire: what the device itself does for the `gpu` handler.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/rdma/ring/wire.hpp"
#include "kernels/rdma/formats.hpp"

namespace deep_ep::rdma {

struct DecodedEntry {
  std::uint32_t opcode = 0;
  WireOperation operation;  ///< a no-operation is a write_inline of no bytes
  std::string mistake;      ///< not empty: why no device would accept the entry; `operation` does nothing then
};

/// Decodes the entry that must be number `index` of this queue pair. Accepted are the entries that the writers of
/// kernels/rdma/formats.hpp make: RDMA write, inline or not, 8-byte fetch-and-add, no-operation.
DecodedEntry decode_entry(const device::rdma::WorkQueueEntry& entry, std::uint64_t index, std::uint32_t queue_pair);

}  // namespace deep_ep::rdma
