// What a kernel needs to post to RDMA queue pairs: plain pointers, filled in by the host.
#pragma once

#include <cstdint>

#include "kernels/rdma/formats.hpp"

namespace deep_ep {

/// A queue pair's memory between kernels. One warp or thread at a time owns it (PortChannel).
struct RdmaQueueState {
  std::uint64_t posted;     ///< entries written and rung since the queue pair was made
  std::uint64_t completed;  ///< of these, known to be complete
  std::uint64_t failure;    ///< 0, or RdmaFailure::packed() of the first failed completion
};

/// What a failed completion said; travels through the 31 bits of FaultRecord::field.
struct RdmaFailure {
  std::uint32_t syndrome = 0;  ///< 0: the completion entry made no sense
  std::uint32_t vendor_syndrome = 0;
  std::uint32_t opcode = 0;  ///< of the work-queue entry; for syndrome 0, of the completion entry

  DEEP_EP_HOST_DEVICE std::uint32_t packed() const { return 1u << 24 | opcode << 16 | vendor_syndrome << 8 | syndrome; }
  DEEP_EP_HOST_DEVICE static RdmaFailure unpack(std::uint32_t bits) {
    return {bits & 0xffu, bits >> 8 & 0xffu, bits >> 16 & 0xffu};
  }
};

/// An RC queue pair to a peer's symmetric heap, as its owner on the device sees it.
struct RdmaQueuePair {
  device::rdma::WorkQueueEntry* ring = nullptr;  ///< [depth]
  /// The collapsed completion queue: one entry, overwritten by every completion.
  const device::rdma::CompletionEntry* completion = nullptr;
  /// Handler `gpu`: a register of the mlx5 device (UAR page), stored behind the record. Other handlers: where a thread
  /// finds the number of entries, in pinned host memory.
  std::uint64_t* doorbell = nullptr;
  /// Of the send queue, for the handler `gpu`; null: a thread reads `doorbell`.
  std::uint32_t* doorbell_record = nullptr;
  RdmaQueueState* state = nullptr;  ///< memory of this GPU
  std::uint32_t number = 0;         ///< 24 bits
  /// Power of two, 64 to 32768: entry numbers in descriptors, doorbells and completions have 16 bits, and no more than
  /// half of them may be outstanding.
  std::uint32_t depth = 0;
  std::uint32_t batch = 32;  ///< entries after which the doorbell is rung unasked, 1 to depth / 2
  /// Ring, record or payload lie in host memory, or other GPUs wrote the payload: fences have to reach the system.
  bool system_scope = true;
  int peer = -1;                         ///< for messages
  device::rdma::KeyedAddress sink = {};  ///< 8 bytes of local memory where old values of additions go; never read
  // Keys of heaps, registered with addresses that start at 0.
  std::uint32_t local_key = 0;
  std::uint32_t remote_key = 0;  ///< of the peer's heap, for payload
  std::uint32_t signal_key = 0;  ///< of the peer's heap, registered with strict ordering; may be remote_key
};

}  // namespace deep_ep
