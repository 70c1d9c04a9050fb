#include "csrc/rdma/verbs/devx/commands.hpp"

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "csrc/support/format.hpp"

namespace deep_ep::rdma::verbs::devx {
namespace {

using layout::Opcode;

constexpr std::uint64_t kLogMessageMax = 30;          // 1 GiB, what a work request may carry
constexpr std::uint64_t kReceiverNotReadyTimer = 12;  // 0.64 ms

constexpr Field of_context(Field field) { return within(layout::queue_pair::context, field); }
constexpr std::uint32_t kPath = layout::queue_pair::context + layout::qpc::primary_address_path;
constexpr Field of_path(Field field) { return within(kPath, field); }

Mailbox with_opcode(Opcode opcode, std::uint32_t bits) {
  Mailbox mailbox(bits);
  mailbox.set(layout::command::opcode, static_cast<std::uint64_t>(opcode));
  return mailbox;
}

/// As contexts of queues have it: the page size as a power of two of 4 KiB.
std::uint64_t log_page(std::size_t page_bytes) { return std::bit_width(page_bytes / 4096) - 1U; }

Mailbox state_change(Opcode opcode, std::uint32_t queue_pair) {
  Mailbox mailbox = with_opcode(opcode, layout::command::context_bits);
  mailbox.set(layout::queue_pair::qpn, queue_pair);
  return mailbox;
}

std::uint64_t log2_down(int value) { return value <= 0 ? 0 : std::bit_width(static_cast<std::uint32_t>(value)) - 1U; }

void set_route(Mailbox& mailbox, const PathOptions& path, const QueuePairAddress& own, const QueuePairAddress& peer,
               const MacAddress& mac) {
  namespace ads = layout::ads;
  mailbox.set(of_path(ads::vhca_port_num), static_cast<std::uint64_t>(path.port));
  const bool global = has_global_route(own, peer);
  if (global) {
    mailbox.set_bytes(kPath + ads::rgid_rip, peer.gid)
        .set(of_path(ads::src_addr_index), static_cast<std::uint64_t>(path.gid_index))
        .set(of_path(ads::hop_limit), kHopLimit);
  }
  if (own.link_layer == LinkLayer::infiniband) {
    // The firmware refuses a traffic class without the header that carries it.
    mailbox.set(of_path(ads::grh), global ? 1 : 0)
        .set(of_path(ads::tclass), global ? path.traffic_class : 0)
        .set(of_path(ads::rlid), peer.lid)
        .set(of_path(ads::sl), path.service_level);
    return;
  }
  mailbox.set(of_path(ads::rmac_47_32), std::uint64_t{mac[0]} << 8 | mac[1])
      .set(of_path(ads::rmac_31_0),
           std::uint64_t{mac[2]} << 24 | std::uint64_t{mac[3]} << 16 | std::uint64_t{mac[4]} << 8 | mac[5])
      .set(of_path(ads::eth_prio), path.service_level & 7U)
      .set(of_path(ads::dscp), path.traffic_class >> 2)
      .set(of_path(ads::udp_sport), udp_source_port(own.queue_pair, peer.queue_pair));
}

}  // namespace

std::uint16_t udp_source_port(std::uint32_t local_queue_pair, std::uint32_t remote_queue_pair) {
  std::uint64_t mixed = (std::uint64_t{local_queue_pair} << 32 | remote_queue_pair) * 0x9e3779b97f4a7c15ULL;
  return static_cast<std::uint16_t>(0xc000U | mixed >> 50);
}

Mailbox query_capabilities_command(std::uint16_t op_mod) {
  Mailbox mailbox = with_opcode(Opcode::query_hca_cap, layout::command::short_bits);
  mailbox.set(layout::command::op_mod, op_mod);
  return mailbox;
}

Mailbox create_completion_queue_command(const QueueMemory& memory, std::uint32_t uar_page, std::uint32_t event_queue) {
  namespace cqc = layout::cqc;
  const std::uint64_t entry = memory.offset + memory.layout.completion;
  const auto of_queue = [](Field field) { return within(layout::create_cq::context, field); };
  Mailbox mailbox = with_opcode(Opcode::create_cq, layout::command::context_bits);
  mailbox.set(layout::create_cq::cq_umem_valid, 1)
      .set(layout::create_cq::cq_umem_id, memory.umem.id())
      .set(layout::create_cq::cq_umem_offset, entry)
      .set(of_queue(cqc::cc), 1)
      .set(of_queue(cqc::oi), 1)
      .set(of_queue(cqc::log_page_size), log_page(memory.umem.page_bytes()))
      .set(of_queue(cqc::uar_page), uar_page)
      .set(of_queue(cqc::c_eqn), event_queue)
      .set(of_queue(cqc::dbr_umem_valid), 1)
      .set(of_queue(cqc::dbr_umem_id), memory.umem.id())
      .set(of_queue(cqc::dbr_addr), memory.offset + memory.layout.unused_record);
  return mailbox;
}

Mailbox create_queue_pair_command(const QueueMemory& memory, std::uint32_t uar_page, std::uint32_t protection_domain,
                                  std::uint32_t completion_queue) {
  namespace qpc = layout::qpc;
  Mailbox mailbox = with_opcode(Opcode::create_qp, layout::command::context_bits);
  mailbox.set(layout::queue_pair::wq_umem_valid, 1)
      .set(layout::queue_pair::wq_umem_id, memory.umem.id())
      .set(layout::queue_pair::wq_umem_offset, memory.offset)
      .set(of_context(qpc::pm_state), qpc::pm_state_migrated)
      .set(of_context(qpc::pd), protection_domain)
      .set(of_context(qpc::uar_page), uar_page)
      .set(of_context(qpc::cqn_snd), completion_queue)
      .set(of_context(qpc::cqn_rcv), completion_queue)
      .set(of_context(qpc::log_sq_size), static_cast<std::uint64_t>(std::countr_zero(memory.layout.depth)))
      .set(of_context(qpc::rq_type), qpc::rq_type_zero_size)
      .set(of_context(qpc::ts_format), qpc::ts_format_default)
      .set(of_context(qpc::log_page_size), log_page(memory.umem.page_bytes()))
      .set(of_context(qpc::dbr_umem_valid), 1)
      .set(of_context(qpc::dbr_umem_id), memory.records.value_or(memory.umem).id())
      .set(of_context(qpc::dbr_addr), memory.records ? memory.record : memory.offset + memory.layout.doorbell);
  return mailbox;
}

Mailbox reset_to_init_command(const PathOptions& path, const QueuePairAddress& own, std::uint8_t counter_set,
                              std::uint8_t physical_port) {
  namespace qpc = layout::qpc;
  Mailbox mailbox = state_change(Opcode::rst2init_qp, own.queue_pair);
  mailbox.set(of_context(qpc::pm_state), qpc::pm_state_migrated)
      .set(of_context(qpc::counter_set_id), counter_set)
      .set(of_context(qpc::lag_tx_port_affinity), physical_port)
      .set(of_context(qpc::rwe), 1)
      .set(of_context(qpc::rae), 1)
      .set(of_context(qpc::atomic_mode), qpc::atomic_mode_up_to_8_bytes)
      .set(of_path(layout::ads::vhca_port_num), static_cast<std::uint64_t>(path.port))
      .set(of_path(layout::ads::pkey_index), path.pkey_index);
  return mailbox;
}

Mailbox init_to_ready_to_receive_command(const PathOptions& path, const QueuePairAddress& own,
                                         const QueuePairAddress& peer, const MacAddress& peer_mac) {
  namespace qpc = layout::qpc;
  Mailbox mailbox = state_change(Opcode::init2rtr_qp, own.queue_pair);
  mailbox.set(of_context(qpc::mtu), std::min(own.mtu, peer.mtu))
      .set(of_context(qpc::log_msg_max), kLogMessageMax)
      .set(of_context(qpc::remote_qpn), peer.queue_pair)
      .set(of_context(qpc::next_rcv_psn), peer.packet_number)
      .set(of_context(qpc::min_rnr_nak), kReceiverNotReadyTimer)
      .set(of_context(qpc::log_rra_max), log2_down(own.outstanding_reads_in));
  set_route(mailbox, path, own, peer, peer_mac);
  return mailbox;
}

Mailbox ready_to_send_command(const PathOptions& path, const QueuePairAddress& own, int outstanding) {
  namespace qpc = layout::qpc;
  Mailbox mailbox = state_change(Opcode::rtr2rts_qp, own.queue_pair);
  mailbox.set(of_context(qpc::log_sra_max), log2_down(outstanding))
      .set(of_context(qpc::next_send_psn), own.packet_number)
      .set(of_context(qpc::retry_count), path.retry_count)
      .set(of_context(qpc::rnr_retry), kReceiverNotReadyRetries)
      .set(of_path(layout::ads::ack_timeout), path.ack_timeout);
  return mailbox;
}

Mailbox query_lag_command() { return with_opcode(Opcode::query_lag, layout::command::short_bits); }

Mailbox query_queue_pair_command(std::uint32_t queue_pair) {
  Mailbox mailbox = with_opcode(Opcode::query_qp, layout::command::short_bits);
  mailbox.set(layout::queue_pair::qpn, queue_pair);
  return mailbox;
}

Mailbox::Mailbox(std::uint32_t bits) : bytes_(bits / 8) {}

Mailbox& Mailbox::set(Field field, std::uint64_t value) {
  if (field.width < 64 && value >> field.width != 0) {
    throw std::logic_error(fmt::format("{:#x} does not fit into {} bits at bit {:#x}", value, field.width, field.bit));
  }
  for (std::uint32_t i = 0; i < field.width; ++i) {
    const std::uint32_t bit = field.bit + field.width - 1 - i;
    const auto mask = static_cast<std::uint8_t>(0x80U >> bit % 8);
    std::uint8_t& byte = bytes_.at(bit / 8);
    byte = static_cast<std::uint8_t>((value >> i & 1) != 0 ? byte | mask : byte & ~mask);
  }
  return *this;
}

std::uint64_t Mailbox::get(Field field) const {
  std::uint64_t value = 0;
  for (std::uint32_t bit = field.bit; bit < field.bit + field.width; ++bit) {
    value = value << 1 | (bytes_.at(bit / 8) >> (7 - bit % 8) & 1);
  }
  return value;
}

Mailbox& Mailbox::set_bytes(std::uint32_t bit, std::span<const std::uint8_t> bytes) {
  for (const std::uint8_t byte : bytes) {
    set({bit, 8}, byte);
    bit += 8;
  }
  return *this;
}

}  // namespace deep_ep::rdma::verbs::devx
