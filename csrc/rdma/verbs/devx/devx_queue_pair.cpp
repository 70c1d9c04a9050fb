// The commands that make and connect a queue pair. Fields that are not set are 0: a reliable connection (st) that
// answers no remote reads (rre) and wants an answer to each packet (log_ack_req_freq); one completion of 64 bytes
// (cqe_sz) without inline data (cs_req, cs_res); no receive queue.
#include "csrc/rdma/verbs/devx/devx_queue_pair.hpp"

#include <bit>
#include <utility>

#include "csrc/rdma/verbs/queue_pair.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep::rdma::verbs::devx {
namespace {

namespace ads = layout::ads;
namespace cqc = layout::cqc;
namespace qpc = layout::qpc;

constexpr std::uint64_t kLogMessageMax = 30;  // 1 GiB, what a work request may carry

/// As contexts of queues have it: the page size as a power of two of 4 KiB.
std::uint64_t log_page(const DevxDevice& device) { return std::bit_width(device.page_bytes / 4096) - 1U; }
std::uint64_t log2_down(unsigned value) { return value == 0 ? 0 : std::bit_width(value) - 1U; }

void set_route(Mailbox& mailbox, DevxDevice& device, const ibv_ah_attr& route, const QueuePairAddress& own,
               const QueuePairAddress& peer) {
  mailbox.set(ads::vhca_port_num, route.port_num);
  if (route.is_global != 0) {
    mailbox.set_bytes(ads::rgid_rip, peer.gid)
        .set(ads::src_addr_index, route.grh.sgid_index)
        .set(ads::hop_limit, route.grh.hop_limit);
  }
  if (own.ethernet == 0) {
    // The firmware refuses a traffic class without the header that carries it: then it is 0.
    mailbox.set(ads::grh, route.is_global)
        .set(ads::tclass, route.grh.traffic_class)
        .set(ads::rlid, route.dlid)
        .set(ads::sl, route.sl);
    return;
  }
  mailbox.set_bytes(ads::rmac, device.mac_of(peer))
      .set(ads::eth_prio, route.sl & 7U)
      .set(ads::dscp, route.grh.traffic_class >> 2)
      .set(ads::udp_sport, udp_source_port(own.queue_pair, peer.queue_pair));
}

}  // namespace

std::uint16_t udp_source_port(std::uint32_t local_queue_pair, std::uint32_t remote_queue_pair) {
  std::uint64_t mixed = (std::uint64_t{local_queue_pair} << 32 | remote_queue_pair) * 0x9e3779b97f4a7c15ULL;
  return static_cast<std::uint16_t>(0xc000U | mixed >> 50);
}

DevxQueuePair::DevxQueuePair(std::shared_ptr<DevxDevice> device, const RingMemory& rings, std::size_t i, Umem umem,
                             Umem records, int port_offset)
    : device_(std::move(device)), umem_(std::move(umem)), records_(std::move(records)), port_offset_(port_offset) {
  // The one entry is overwritten by every completion: the queue is collapsed (cc). Its doorbell record is never
  // written: nothing is armed, and an overrun is the normal case (oi).
  Request of_completions(layout::kCreateCq);
  of_completions.set(layout::create_cq::cq_umem_valid, 1)
      .set(layout::create_cq::cq_umem_id, umem_.memory->umem_id)
      .set(layout::create_cq::cq_umem_offset, umem_.offset_of(rings.completion(i)))
      .set(cqc::cc, 1)
      .set(cqc::oi, 1)
      .set(cqc::log_page_size, log_page(*device_))
      .set(cqc::uar_page, device_->doorbell->page_id)
      .set(cqc::c_eqn, device_->event_queue)
      .set(cqc::dbr_umem_valid, 1)
      .set(cqc::dbr_umem_id, umem_.memory->umem_id)
      .set(cqc::dbr_addr, umem_.offset_of(rings.ring(i)) + rings.options().doorbell() + 64);
  completion_queue_ = device_->create(of_completions);

  Request of_pair(layout::kCreateQp);
  of_pair.set(layout::queue_pair::wq_umem_valid, 1)
      .set(layout::queue_pair::wq_umem_id, umem_.memory->umem_id)
      .set(layout::queue_pair::wq_umem_offset, umem_.offset_of(rings.ring(i)))
      .set(qpc::pm_state, qpc::pm_state_migrated)
      .set(qpc::pd, device_->protection_domain)
      .set(qpc::uar_page, device_->doorbell->page_id)
      .set(qpc::cqn_snd, completion_queue_.number)
      .set(qpc::cqn_rcv, completion_queue_.number)
      .set(qpc::log_sq_size, static_cast<std::uint64_t>(std::countr_zero(rings.options().depth)))
      .set(qpc::rq_type, qpc::rq_type_zero_size)
      .set(qpc::ts_format, qpc::ts_format_default)
      .set(qpc::log_page_size, log_page(*device_))
      .set(qpc::dbr_umem_valid, 1)
      .set(qpc::dbr_umem_id, records_.memory->umem_id)
      .set(qpc::dbr_addr, records_.offset_of(rings.doorbell_record(i) - 1));
  queue_pair_ = device_->create(of_pair);
}

Request DevxQueuePair::request(const Command& command) const {
  Request request(command);
  request.set(layout::queue_pair::qpn, number());
  return request;
}

void DevxQueuePair::connect(const QueuePairAddress& peer) {
  const Device& device = *device_->device;
  const PathOptions& path = device.path();
  const ibv_qp_attr wanted = connection_to(device, peer);
  const int ports = device_->bonded_ports;
  Request to_init = request(layout::kRst2InitQp);
  to_init.set(qpc::pm_state, qpc::pm_state_migrated)
      .set(qpc::counter_set_id, device_->counter_set)
      .set(qpc::lag_tx_port_affinity, static_cast<std::uint64_t>(ports > 1 ? 1 + port_offset_ % ports : 0))
      .set(qpc::rwe, 1)
      .set(qpc::rae, 1)
      .set(qpc::atomic_mode, qpc::atomic_mode_up_to_8_bytes)
      .set(ads::vhca_port_num, static_cast<std::uint64_t>(path.port))
      .set(ads::pkey_index, path.pkey_index);
  try {
    modify(to_init);
  } catch (const SystemError& error) {
    if (device_->counter_set == 0) throw;
    device_->counter_set = 0;
    log::warn("rdma: {}: losses and retries are not counted, because: {}", device.name(), error.what());
    to_init.set(qpc::counter_set_id, 0);
    modify(to_init);
  }

  Request to_receive = request(layout::kInit2RtrQp);
  to_receive.set(qpc::mtu, wanted.path_mtu)
      .set(qpc::log_msg_max, kLogMessageMax)
      .set(qpc::remote_qpn, wanted.dest_qp_num)
      .set(qpc::next_rcv_psn, wanted.rq_psn)
      .set(qpc::min_rnr_nak, wanted.min_rnr_timer)
      .set(qpc::log_rra_max, log2_down(wanted.max_dest_rd_atomic));
  set_route(to_receive, *device_, wanted.ah_attr, address(), peer);
  modify(to_receive);

  Request to_send = request(layout::kRtr2RtsQp);
  to_send.set(qpc::log_sra_max, log2_down(wanted.max_rd_atomic))
      .set(qpc::next_send_psn, wanted.sq_psn)
      .set(qpc::retry_count, wanted.retry_cnt)
      .set(qpc::rnr_retry, wanted.rnr_retry)
      .set(ads::ack_timeout, wanted.timeout);
  modify(to_send);
}

std::string DevxQueuePair::trouble(std::uint64_t posted, std::uint32_t outstanding) const {
  const Mailbox answer =
      device_->ask(queue_pair_.object.get(), device_->functions.obj_query, request(layout::kQueryQp));
  if (const auto state = answer.get(qpc::state); state != qpc::state_ready_to_send) {
    return state == qpc::state_error ? "its state is 'error'" : fmt::format("its state is {}", state);
  }
  if (outstanding == 0) return {};
  const std::uint64_t told = answer.get(qpc::sw_sq_wqebb_counter);  // entries that doorbells announced
  const std::uint64_t fetched = answer.get(qpc::hw_sq_wqebb_counter);
  return fmt::format("of {} entries under way the device was not told of {} and has not fetched {}", outstanding,
                     static_cast<std::uint16_t>(posted - told), static_cast<std::uint16_t>(told - fetched));
}

}  // namespace deep_ep::rdma::verbs::devx
