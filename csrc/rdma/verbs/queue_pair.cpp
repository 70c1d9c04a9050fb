#include "csrc/rdma/verbs/queue_pair.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "csrc/rdma/discovery/gid.hpp"
#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {
namespace {

std::uint8_t to_byte(int value) { return static_cast<std::uint8_t>(std::clamp(value, 0, 255)); }

void modify(const QueuePair& pair, ibv_qp_attr& attributes, int mask, const std::string& step) {
  const int error = pair.device().functions().modify_qp(pair.get(), &attributes, mask);
  if (error == 0) return;
  // Routes are looked up at this step, so a wrong GID or subnet shows here and nowhere else.
  const char* hint = error == ENETUNREACH || error == ETIMEDOUT || error == EHOSTUNREACH
                         ? " (no route to the peer: wrong GID index, subnet, or a link that is down)"
                         : "";
  fail<SystemError>("RDMA device {}: ibv_modify_qp of queue pair {:#x} {}: {}{}", pair.device().name(), pair.number(),
                    step, errno_text(error), hint);
}

}  // namespace

CompletionQueue::CompletionQueue(std::shared_ptr<Device> device, std::uint32_t depth) : device_(std::move(device)) {
  errno = 0;
  queue_ = device_->functions().create_cq(device_->context(), static_cast<int>(depth), nullptr, nullptr, 0);
  if (queue_ == nullptr) {
    fail<SystemError>("RDMA device {}: ibv_create_cq of {} entries: {}", device_->name(), depth, errno_text(errno));
  }
}

CompletionQueue::~CompletionQueue() {
  const int error = device_->functions().destroy_cq(queue_);
  if (error != 0) log::warn("RDMA device {}: ibv_destroy_cq: {}", device_->name(), errno_text(error));
}

QueuePairAddress local_address(const Device& device, const PathOptions& path) {
  const ibv_port_attr port = device.port(path.port);
  if (port.state != IBV_PORT_ACTIVE) {
    fail<SystemError>("RDMA device {} port {} is {}, not active: no link, or its network interface is down",
                      device.name(), path.port, device.functions().port_state_str(port.state));
  }
  const bool ethernet = port.link_layer == IBV_LINK_LAYER_ETHERNET;
  QueuePairAddress address;
  address.lid = port.lid;
  address.mtu = static_cast<std::uint8_t>(port.active_mtu);
  address.link_layer = ethernet ? LinkLayer::ethernet : LinkLayer::infiniband;
  address.needs_global_route = (port.flags & IBV_QPF_GRH_REQUIRED) != 0 ? 1 : 0;
  address.gid = device.gid(path.port, path.gid_index);
  address.packet_number = device.first_packet();
  address.outstanding_reads_in = to_byte(device.limits().max_qp_rd_atom);
  if ((ethernet || address.needs_global_route != 0) && GidEntry{.bytes = address.gid}.is_zero()) {
    fail<InvalidArgument>(
        "GID index {} of RDMA device {} port {} is empty (0 to {} exist; an address is missing on "
        "its network interface, or the index is wrong)",
        path.gid_index, device.name(), path.port, port.gid_tbl_len - 1);
  }
  return address;
}

QueuePair::QueuePair(std::shared_ptr<CompletionQueue> completions, std::uint32_t send_depth, const PathOptions& path)
    : completions_(std::move(completions)), path_(path), send_depth_(send_depth) {
  address_ = local_address(device(), path_);
  create();
  try {
    initialise();
  } catch (...) {
    device().functions().destroy_qp(pair_);
    throw;
  }
}

QueuePair::~QueuePair() {
  const int error = device().functions().destroy_qp(pair_);
  if (error != 0) log::warn("RDMA device {}: ibv_destroy_qp: {}", device().name(), errno_text(error));
}

std::uint32_t QueuePair::number() const { return pair_->qp_num; }

void QueuePair::create() {
  ibv_qp_init_attr attributes{};
  attributes.send_cq = completions_->get();
  attributes.recv_cq = completions_->get();
  attributes.qp_type = IBV_QPT_RC;
  attributes.cap.max_send_wr = send_depth_;
  attributes.cap.max_recv_wr = 1;  // Nothing is ever received; some providers refuse 0.
  attributes.cap.max_send_sge = 1;
  attributes.cap.max_recv_sge = 1;
  errno = 0;
  pair_ = device().functions().create_qp(device().protection_domain(), &attributes);
  if (pair_ == nullptr) {
    fail<SystemError>("RDMA device {}: ibv_create_qp (reliable connection, {} send requests): {}", device().name(),
                      send_depth_, errno_text(errno));
  }
  address_.queue_pair = pair_->qp_num;
}

void QueuePair::initialise() {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_INIT;
  attributes.pkey_index = path_.pkey_index;
  attributes.port_num = static_cast<std::uint8_t>(path_.port);
  attributes.qp_access_flags = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;
  modify(*this, attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS, "to INIT");
}

void QueuePair::connect(const QueuePairAddress& peer) {
  check_compatible(device().name(), address_, peer);
  become_ready_to_receive(peer);
  become_ready_to_send(peer);
}

void QueuePair::become_ready_to_receive(const QueuePairAddress& peer) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTR;
  attributes.path_mtu = static_cast<ibv_mtu>(std::min(address_.mtu, peer.mtu));
  attributes.dest_qp_num = peer.queue_pair;
  attributes.rq_psn = peer.packet_number;
  attributes.max_dest_rd_atomic = address_.outstanding_reads_in;
  attributes.min_rnr_timer = 12;  // 0.64 ms
  ibv_ah_attr& route = attributes.ah_attr;
  route.dlid = peer.lid;
  route.sl = path_.service_level;
  route.port_num = static_cast<std::uint8_t>(path_.port);
  if (has_global_route(address_, peer)) {
    route.is_global = 1;
    std::memcpy(route.grh.dgid.raw, peer.gid.data(), peer.gid.size());
    route.grh.sgid_index = static_cast<std::uint8_t>(path_.gid_index);
    route.grh.hop_limit = kHopLimit;
    route.grh.traffic_class = path_.traffic_class;
  }
  modify(*this, attributes,
         IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN | IBV_QP_MAX_DEST_RD_ATOMIC |
             IBV_QP_MIN_RNR_TIMER,
         fmt::format("to RTR with {}", to_string(peer)));
}

void QueuePair::become_ready_to_send(const QueuePairAddress& peer) {
  ibv_qp_attr attributes{};
  attributes.qp_state = IBV_QPS_RTS;
  attributes.sq_psn = address_.packet_number;
  attributes.timeout = path_.ack_timeout;
  attributes.retry_cnt = path_.retry_count;
  attributes.rnr_retry = kReceiverNotReadyRetries;
  attributes.max_rd_atomic = std::min(to_byte(device().limits().max_qp_init_rd_atom), peer.outstanding_reads_in);
  modify(*this, attributes,
         IBV_QP_STATE | IBV_QP_SQ_PSN | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_MAX_QP_RD_ATOMIC,
         "to RTS");
}

}  // namespace deep_ep::rdma::verbs
