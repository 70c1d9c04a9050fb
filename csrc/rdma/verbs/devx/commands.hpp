// The commands that make and connect a queue pair whose ring a GPU fills. Plain data in, mailboxes out. Fields that are
// not set are 0: a reliable connection (st) that answers no remote reads (rre) and wants an answer to each packet
// (log_ack_req_freq); one completion of 64 bytes (cqe_sz) without inline data (cs_req, cs_res); no receive queue.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

#include "csrc/rdma/ring/ring_memory.hpp"
#include "csrc/rdma/verbs/devx/layout.hpp"
#include "csrc/rdma/verbs/devx/objects.hpp"
#include "csrc/rdma/verbs/queue_pair.hpp"

namespace deep_ep::rdma::verbs::devx {

/// The memory of one queue pair. Before the first kernel uses it, the completion entry must say "not yet written" (all
/// bytes 0xff), and the doorbell records must be 0.
struct QueueMemory {
  Umem umem;
  std::uint64_t offset = 0;  ///< in it, in bytes; it and the layout are aligned to the page size of GPUs
  RingLayout layout = {};
  std::optional<Umem> records = {};  ///< other memory for the doorbell record; without it, it lies as the layout says
  std::uint64_t record = 0;          ///< in that memory
};

using MacAddress = std::array<std::uint8_t, 6>;

Mailbox query_capabilities_command(std::uint16_t op_mod);
/// The one entry is overwritten by every completion: the queue is collapsed. Its doorbell record is never written:
/// nothing is armed, and an overrun is the normal case.
Mailbox create_completion_queue_command(const QueueMemory& memory, std::uint32_t uar_page, std::uint32_t event_queue);
Mailbox create_queue_pair_command(const QueueMemory& memory, std::uint32_t uar_page, std::uint32_t protection_domain,
                                  std::uint32_t completion_queue);
/// `counter_set`: see DevxDevice. `physical_port`: of bonded ports, from 1; 0: not bonded.
Mailbox reset_to_init_command(const PathOptions& path, const QueuePairAddress& own, std::uint8_t counter_set,
                              std::uint8_t physical_port);
/// `peer_mac`: on RoCE.
Mailbox init_to_ready_to_receive_command(const PathOptions& path, const QueuePairAddress& own,
                                         const QueuePairAddress& peer, const MacAddress& peer_mac);
/// `outstanding`: additions under way.
Mailbox ready_to_send_command(const PathOptions& path, const QueuePairAddress& own, int outstanding);
Mailbox query_queue_pair_command(std::uint32_t queue_pair);
Mailbox query_lag_command();

/// Source port of the UDP packets: the network spreads connections over its paths by it. 0xc000 to 0xffff.
std::uint16_t udp_source_port(std::uint32_t local_queue_pair, std::uint32_t remote_queue_pair);

}  // namespace deep_ep::rdma::verbs::devx
