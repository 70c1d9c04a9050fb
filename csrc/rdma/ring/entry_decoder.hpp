// From a work-queue entry of mlx5 format to an operation for a wire: what the device itself does for the `gpu` handler.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/rdma/ring/wire.hpp"
#include "kernels/rdma/decode.hpp"

namespace deep_ep::rdma {

struct DecodedEntry {
  std::uint32_t opcode = 0;
  WireOperation operation;  ///< a no-operation is a write_inline of no bytes
  std::string mistake;      ///< not empty: why no device would accept the entry; `operation` does nothing then
};

/// Decodes the entry that must be number `index` of this queue pair, see kernels/rdma/decode.hpp.
DecodedEntry decode_entry(const device::rdma::WorkQueueEntry& entry, std::uint64_t index, std::uint32_t queue_pair);

/// What is wrong with an entry or doorbell, in words; empty where nothing is. Of the operation, what it says counts.
std::string describe_mistake(const device::rdma::Operation& operation, std::uint64_t index);

}  // namespace deep_ep::rdma
