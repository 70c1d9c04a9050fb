#include "csrc/rdma/verbs/queue_pair.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep::rdma::verbs {
namespace {

const char* link_layer(const QueuePairAddress& address) { return address.ethernet != 0 ? "Ethernet" : "InfiniBand"; }

/// RankMismatch unless queue pairs with these addresses can be connected.
void check_compatible(const Device& device, const QueuePairAddress& own, const QueuePairAddress& peer) {
  if (peer.ethernet != own.ethernet) {
    fail<RankMismatch>("RDMA device {} is {}, the peer is {}: give every rank a device of the same fabric",
                       device.name(), link_layer(own), link_layer(peer));
  }
  const GidEntry here{.bytes = own.gid}, there{.bytes = peer.gid};
  if (own.ethernet != 0 && here.is_ipv4_mapped() != there.is_ipv4_mapped()) {
    fail<RankMismatch>(
        "RDMA device {}: GID {} here and GID {} of the peer are of different families (IPv4, IPv6): "
        "choose the same kind of GID on all ranks",
        device.name(), here.address(), there.address());
  }
}

}  // namespace

std::string to_string(const QueuePairAddress& address) {
  return fmt::format("queue pair {:#x} at GID {} LID {} ({})", address.queue_pair,
                     GidEntry{.bytes = address.gid}.address(), address.lid, link_layer(address));
}

ibv_ah_attr route_to(const Device& device, const QueuePairAddress& peer) {
  const PathOptions& path = device.path();
  ibv_ah_attr route{};
  route.dlid = peer.lid;
  route.sl = path.service_level;
  route.port_num = static_cast<std::uint8_t>(path.port);
  if (device.address().needs_global_route != 0 || peer.needs_global_route != 0) {
    route.is_global = 1;
    std::memcpy(route.grh.dgid.raw, peer.gid.data(), peer.gid.size());
    route.grh.sgid_index = static_cast<std::uint8_t>(path.gid_index);
    route.grh.hop_limit = 64;
    route.grh.traffic_class = path.traffic_class;
  }
  return route;
}

ibv_qp_attr connection_to(const Device& device, const QueuePairAddress& peer, bool hasty) {
  const QueuePairAddress own = device.address();
  check_compatible(device, own, peer);
  ibv_qp_attr attributes{};
  attributes.path_mtu = static_cast<ibv_mtu>(std::min(own.mtu, peer.mtu));
  attributes.dest_qp_num = peer.queue_pair;
  attributes.rq_psn = peer.packet_number;
  attributes.max_dest_rd_atomic = own.outstanding_reads_in;
  attributes.min_rnr_timer = 12;  // 0.64 ms
  attributes.ah_attr = route_to(device, peer);
  attributes.sq_psn = own.packet_number;
  // Hasty: 67 ms; devices take up to four times as long.
  attributes.timeout = hasty ? std::uint8_t{14} : device.path().ack_timeout;
  attributes.retry_cnt = hasty ? std::uint8_t{3} : device.path().retry_count;
  attributes.rnr_retry = 7;  // a peer that is not ready is asked for ever; writes and atomics never need it
  attributes.max_rd_atomic =
      static_cast<std::uint8_t>(std::clamp(device.limits().max_qp_init_rd_atom, 0, int{peer.outstanding_reads_in}));
  return attributes;
}

QueuePair::QueuePair(std::shared_ptr<Device> device, ibv_cq* completions, std::uint32_t send_depth)
    : device_(std::move(device)) {
  ibv_qp_init_attr wanted{};
  wanted.send_cq = wanted.recv_cq = completions != nullptr ? completions : device_->idle_completions();
  wanted.qp_type = IBV_QPT_RC;
  wanted.cap.max_send_wr = send_depth;
  wanted.cap.max_recv_wr = 1;  // Nothing is ever received; some providers refuse 0.
  wanted.cap.max_send_sge = 1;
  wanted.cap.max_recv_sge = 1;
  errno = 0;
  ibv_qp* const made = device_->functions().create_qp(device_->protection_domain(), &wanted);
  device_->require(errno_unless(made != nullptr),
                   fmt::format("ibv_create_qp (reliable connection, {} send requests)", send_depth));
  pair_ = device_->owned(made, device_->functions().destroy_qp, "ibv_destroy_qp");
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.pkey_index = device_->path().pkey_index;
  attributes.port_num = static_cast<std::uint8_t>(device_->path().port);
  attributes.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
  modify(attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "to INIT");
}

void QueuePair::modify(ibv_qp_attr& attributes, int mask, const std::string& step) const {
  const int error = device_->functions().modify_qp(get(), &attributes, mask);
  // Routes are looked up at this step, so a wrong GID or subnet shows here and nowhere else.
  const bool no_route = error == ENETUNREACH || error == ETIMEDOUT || error == EHOSTUNREACH;
  device_->require(error, fmt::format("ibv_modify_qp of queue pair {:#x} {}", number(), step),
                   no_route ? kNoRoute : "");
}

void QueuePair::connect(const QueuePairAddress& peer, bool hasty) const {
  ibv_qp_attr attributes = connection_to(*device_, peer, hasty);
  attributes.qp_state = IBV_QPS_RTR;
  modify(attributes,
         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
             IBV_QP_MIN_RNR_TIMER,
         fmt::format("to RTR with {}", to_string(peer)));
  attributes.qp_state = IBV_QPS_RTS;
  modify(attributes,
         IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC,
         "to RTS");
}

}  // namespace deep_ep::rdma::verbs
