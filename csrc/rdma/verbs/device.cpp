#include "csrc/rdma/verbs/device.hpp"

#include <poll.h>

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

Device::Device(std::string name, const PathOptions& path, const VerbsFunctions& functions, const MemoryRange& heap,
               bool any_order)
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
  require(functions_.query_device(context(), &limits_), "ibv_query_device");
  // Linux says this of an mlx5 device that adds, with operands of 8 bytes, in the order of bytes that processors have.
  if (limits_.atomic_cap != IBV_ATOMIC_HCA && limits_.atomic_cap != IBV_ATOMIC_GLOB) {
    fail<SystemError>(
        "RDMA device {} has no 8-byte fetch-and-add, which signals need; of an mlx5 device see PCI_ATOMIC_MODE in its "
        "firmware configuration",
        name_);
  }
  errno = 0;
  ibv_pd* const domain = functions_.alloc_pd(context());
  require(errno_unless(domain != nullptr), "ibv_alloc_pd");
  protection_domain_ = owned(domain, functions_.dealloc_pd, "ibv_dealloc_pd");
  address_ = find_address();
  // Peers write and add; nothing reads remotely. The device refuses additions by a key of any order.
  constexpr int kWrites = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
  signals_ = payload_ = register_heap(heap, kWrites | IBV_ACCESS_REMOTE_ATOMIC);
  if (any_order) payload_ = register_heap(heap, kWrites | IBV_ACCESS_RELAXED_ORDERING);
  address_.heap_key = payload_->rkey;
  address_.signal_key = signals_->rkey;
  idle_completions_ = make_completion_queue(1);
}

std::shared_ptr<ibv_mr> Device::register_heap(const MemoryRange& heap, int access) {
  ibv_mr* made = nullptr;
  heap_path_ = register_memory(name_, heap, "ibv_reg_mr", [&](int dma_buf) {
    ibv_pd* const domain = protection_domain();
    made = dma_buf >= 0 ? functions_.reg_dmabuf_mr(domain, 0, heap.bytes, 0, dma_buf, access)
                        : functions_.reg_mr_iova2(domain, heap.address, heap.bytes, 0, static_cast<unsigned>(access));
    return made != nullptr;
  });
  return owned(made, functions_.dereg_mr, "ibv_dereg_mr");
}

std::shared_ptr<ibv_cq> Device::make_completion_queue(std::uint32_t depth) const {
  errno = 0;
  ibv_cq* const made = functions_.create_cq(context(), static_cast<int>(depth), nullptr, nullptr, 0);
  require(errno_unless(made != nullptr), fmt::format("ibv_create_cq of {} entries", depth));
  return owned(made, functions_.destroy_cq, "ibv_destroy_cq");
}

void Device::require(int error, const std::string& call, const char* hint) const {
  if (error != 0) fail<SystemError>("RDMA device {}: {}: {}{}", name_, call, errno_text(error), hint);
}

void Device::note_end(const char* call, int error) const {
  if (error != 0) log::warn("RDMA device {}: {}: {}", name_, call, errno_text(error));
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
  address.ethernet = ethernet ? 1 : 0;
  address.needs_global_route = ethernet || (port.flags & IBV_QPF_GRH_REQUIRED) != 0 ? 1 : 0;
  ibv_gid gid{};
  errno = 0;
  const int refused = functions_.query_gid(context(), static_cast<std::uint8_t>(path_.port), path_.gid_index, &gid);
  require(errno_unless(refused == 0), fmt::format("ibv_query_gid of port {}, index {}", path_.port, path_.gid_index));
  std::memcpy(address.gid.data(), gid.raw, sizeof gid.raw);
  // Random for each opening, so that late packets of an old connection, whose queue pair had the same number, do not
  // fit.
  address.packet_number = random_bits<std::uint32_t>() & 0xffffff;
  address.outstanding_reads_in = static_cast<std::uint8_t>(std::clamp(limits_.max_qp_rd_atom, 0, 255));
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
  require(functions_.query_port(context(), static_cast<std::uint8_t>(path_.port),
                                reinterpret_cast<_compat_ibv_port_attr*>(&attributes)),
          fmt::format("ibv_query_port of port {}", path_.port));
  return attributes;
}

}  // namespace deep_ep::rdma::verbs
