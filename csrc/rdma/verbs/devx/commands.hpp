// The commands that make and connect a queue pair whose ring a GPU fills. Plain data in, mailboxes out.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "csrc/rdma/verbs/devx/layout.hpp"
#include "csrc/rdma/verbs/devx/mailbox.hpp"
#include "csrc/rdma/verbs/queue_pair.hpp"

namespace deep_ep::rdma::verbs::devx {

/// A place in memory that is registered as a UMEM.
struct UmemPlace {
  std::uint32_t id = 0;
  std::uint64_t offset = 0;  ///< bytes
};

struct CompletionQueueCommand {
  UmemPlace entry;                ///< the one entry: the queue is collapsed, every completion overwrites it
  UmemPlace doorbell_record;      ///< never written: nothing is armed, and an overrun is the normal case
  std::size_t page_bytes = 4096;  ///< of the UMEM of the entry
  std::uint32_t event_queue = 0;
  std::uint32_t uar_page = 0;
};

struct QueuePairCommand {
  UmemPlace ring;
  std::size_t page_bytes = 4096;  ///< of the ring's UMEM
  UmemPlace doorbell_record;      ///< of receive queue and send queue, 4 bytes each
  std::uint32_t log_depth = 0;    ///< of the ring, in blocks of 64 bytes
  std::uint32_t protection_domain = 0;
  std::uint32_t completion_queue = 0;
  std::uint32_t uar_page = 0;
  std::uint32_t user_index = 0;  ///< comes back in error completions
};

/// One end's view of the connection.
struct ConnectionCommand {
  std::uint32_t queue_pair = 0;
  PathOptions path;
  QueuePairAddress own;
  QueuePairAddress peer;
  std::array<std::uint8_t, 6> peer_mac{};  ///< RoCE
  std::uint32_t log_outstanding_out = 0;   ///< atomics and reads under way, as a power of two
  std::uint32_t log_outstanding_in = 0;
  std::uint8_t counter_set = 0;    ///< see PortTraits
  std::uint8_t physical_port = 0;  ///< of bonded ports, from 1; 0: not bonded
};

Mailbox query_capabilities_command(std::uint16_t op_mod);
Mailbox create_completion_queue_command(const CompletionQueueCommand& command);
Mailbox create_queue_pair_command(const QueuePairCommand& command);
Mailbox reset_to_init_command(const ConnectionCommand& command);
Mailbox init_to_ready_to_receive_command(const ConnectionCommand& command);
Mailbox ready_to_send_command(const ConnectionCommand& command);
Mailbox query_queue_pair_command(std::uint32_t queue_pair);
Mailbox query_lag_command();

/// Source port of the UDP packets: the network spreads connections over its paths by it. 0xc000 to 0xffff.
std::uint16_t udp_source_port(std::uint32_t local_queue_pair, std::uint32_t remote_queue_pair);

}  // namespace deep_ep::rdma::verbs::devx
