// What the two ends of a queue pair tell each other.
#pragma once

#include <cstdint>
#include <type_traits>

#include "csrc/rdma/discovery/gid.hpp"

namespace deep_ep::rdma {

/// What one end of a queue pair must know of the other. Plain bytes in the byte order of the machine: all ranks share
/// one.
struct QueuePairAddress {
  std::uint32_t queue_pair = 0;
  std::uint32_t packet_number = 0;  ///< first one that this end sends
  std::uint16_t lid = 0;
  std::uint8_t mtu = 0;       ///< code of the specification: 1 = 256 bytes ... 5 = 4096 bytes
  std::uint8_t ethernet = 0;  ///< 1: RoCE; 0: InfiniBand, or no network between the ends
  std::uint8_t outstanding_reads_in = 0;
  std::uint8_t needs_global_route = 0;  ///< 1: the port takes no packets without a global route header
  std::uint8_t padding[2] = {};
  std::uint32_t heap_key = 0;    ///< by which the peer writes to this rank's heap
  std::uint32_t signal_key = 0;  ///< by which it adds there
  GidBytes gid{};
};
static_assert(std::is_trivially_copyable_v<QueuePairAddress> && sizeof(QueuePairAddress) == 40);

}  // namespace deep_ep::rdma
