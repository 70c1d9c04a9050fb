#include "csrc/rdma/verbs/device.hpp"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "csrc/support/token.hpp"

namespace deep_ep::rdma::verbs {

std::size_t host_page_bytes() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

void require(const std::string& device, int error, const std::string& call, const char* hint) {
  if (error != 0) fail<SystemError>("RDMA device {}: {}: {}{}", device, call, errno_text(error), hint);
}

void note_end(const std::string& device, const char* call, int error) {
  if (error != 0) log::warn("RDMA device {}: {}: {}", device, call, errno_text(error));
}

Device::Device(std::string name, const PathOptions& path, const VerbsFunctions& functions)
    : name_(std::move(name)), path_(path), functions_(functions) {
  int count = 0;
  // A kernel without RDMA answers with an error; that is "no device" as well.
  const std::unique_ptr<ibv_device*, void (*)(ibv_device**)> list(functions_.get_device_list(&count),
                                                                  functions_.free_device_list);
  std::vector<std::string> names;
  for (int i = 0; list != nullptr && i < count && context_ == nullptr; ++i) {
    names.emplace_back(functions_.get_device_name(list.get()[i]));
    if (names.back() != name_) continue;
    errno = 0;
    ibv_context* const opened = functions_.open_device(list.get()[i]);
    if (opened == nullptr) {
      fail<SystemError>("RDMA device {}: ibv_open_device: {} (needs read and write access to /dev/infiniband/uverbs*)",
                        name_, errno_text(errno));
    }
    context_ = {opened, functions_.close_device};
  }
  if (context_ == nullptr) {
    if (names.empty()) names = {"no device at all"};
    fail<InvalidArgument>("RDMA device '{}' is not on this machine; libibverbs sees: {}", name_,
                          fmt::join(names, ", "));
  }
  require(name_, functions_.query_device(context(), &limits_), "ibv_query_device");
  // Linux says this of an mlx5 device that adds, with operands of 8 bytes, in the order of bytes that processors have.
  if (limits_.atomic_cap != IBV_ATOMIC_HCA && limits_.atomic_cap != IBV_ATOMIC_GLOB) {
    fail<SystemError>(
        "RDMA device {} has no 8-byte fetch-and-add, which signals need; of an mlx5 device see PCI_ATOMIC_MODE in its "
        "firmware configuration",
        name_);
  }
  errno = 0;
  ibv_pd* const domain = functions_.alloc_pd(context());
  require(name_, errno_unless(domain != nullptr), "ibv_alloc_pd");
  protection_domain_ = {domain,
                        [this](ibv_pd* gone) { note_end(name_, "ibv_dealloc_pd", functions_.dealloc_pd(gone)); }};
  address_ = find_address();
}

QueuePairAddress Device::find_address() const {
  const ibv_port_attr port = this->port();
  if (port.state != IBV_PORT_ACTIVE) {
    fail<SystemError>("RDMA device {} port {} is {}, not active: no link, or its network interface is down", name_,
                      path_.port, functions_.port_state_str(port.state));
  }
  const bool ethernet = port.link_layer == IBV_LINK_LAYER_ETHERNET;
  QueuePairAddress address;
  address.lid = port.lid;
  address.mtu = static_cast<std::uint8_t>(port.active_mtu);
  address.link_layer = ethernet ? LinkLayer::ethernet : LinkLayer::infiniband;
  address.needs_global_route = (port.flags & IBV_QPF_GRH_REQUIRED) != 0 ? 1 : 0;
  ibv_gid gid{};
  errno = 0;
  const int refused = functions_.query_gid(context(), static_cast<std::uint8_t>(path_.port), path_.gid_index, &gid);
  require(name_, errno_unless(refused == 0),
          fmt::format("ibv_query_gid of port {}, index {}", path_.port, path_.gid_index));
  std::memcpy(address.gid.data(), gid.raw, sizeof gid.raw);
  // Random for each opening, so that late packets of an old connection, whose queue pair had the same number, do not
  // fit.
  address.packet_number = random_bits<std::uint32_t>() & 0xffffff;
  address.outstanding_reads_in = static_cast<std::uint8_t>(std::clamp(limits_.max_qp_rd_atom, 0, 255));
  // Also where this port takes packets without a global route: a peer's may not, and then this GID is the source.
  if (GidEntry{.bytes = address.gid}.is_zero()) {
    fail<InvalidArgument>(
        "GID index {} of RDMA device {} port {} is empty (0 to {} exist; an address is missing on its network "
        "interface, or the index is wrong: DEEP_EP_RDMA_GID_INDEX=auto chooses one)",
        path_.gid_index, name_, path_.port, port.gid_tbl_len - 1);
  }
  return address;
}

bool Device::has_failed() {
  const std::lock_guard lock(events_mutex_);
  pollfd waiting{context()->async_fd, POLLIN, 0};
  while (!failed_ && ::poll(&waiting, 1, 0) > 0 && (waiting.revents & POLLIN) != 0) {
    ibv_async_event event{};
    if (functions_.get_async_event(context(), &event) != 0) break;
    log::warn("RDMA device {}: {}", name_, functions_.event_type_str(event.event_type));
    // An overrun completion queue loses completions for good.
    failed_ = event.event_type == IBV_EVENT_DEVICE_FATAL || event.event_type == IBV_EVENT_CQ_ERR;
    functions_.ack_async_event(&event);
  }
  return failed_;
}

ibv_port_attr Device::port() const {
  ibv_port_attr attributes{};
  // The exported function fills the fields that are read here.
  require(name_,
          functions_.query_port(context(), static_cast<std::uint8_t>(path_.port),
                                reinterpret_cast<_compat_ibv_port_attr*>(&attributes)),
          fmt::format("ibv_query_port of port {}", path_.port));
  return attributes;
}

}  // namespace deep_ep::rdma::verbs
