// What is told to people when an RDMA operation fails.
#pragma once

#include <cstdint>
#include <string>

#include "csrc/rdma/ring/syndrome.hpp"

namespace deep_ep {
struct FaultRecord;
}

namespace deep_ep::rdma {

/// A failed work-queue entry.
struct Failure {
  int peer = -1;                       ///< rank at the other end; negative: unknown
  std::string device;                  ///< the NIC or wire that reported it; empty: unknown
  std::uint32_t queue_pair = 0;        ///< 0: unknown
  std::uint64_t index = 0;             ///< of the entry, since the queue pair was made
  std::uint32_t opcode = 0;            ///< of the entry
  Syndrome syndrome = Syndrome::none;  ///< none: not a completion; `detail` says what
  std::uint8_t vendor_syndrome = 0;
  std::string detail;  ///< more about the cause; may be empty
};

/// "RDMA write", "RDMA fetch-and-add", "operation with unknown opcode 0x2a".
std::string operation_name(std::uint32_t opcode);

/// One sentence without a full stop: operation, peer, device, queue pair, entry, syndrome with its text.
std::string describe(const Failure& failure);

/// The same for a fault that a kernel put on record (FaultKind::rdma_failed) on this rank.
std::string describe_fault(int rank, const FaultRecord& fault);

}  // namespace deep_ep::rdma
