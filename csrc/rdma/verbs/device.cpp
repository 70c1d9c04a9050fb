#include "csrc/rdma/verbs/device.hpp"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {
std::size_t host_page_bytes() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

std::shared_ptr<Device> Device::open(const std::string& name, const VerbsFunctions& functions) {
  return std::shared_ptr<Device>(new Device(name, functions));
}

Device::Device(std::string name, const VerbsFunctions& functions) : name_(std::move(name)), functions_(functions) {
  int count = 0;
  // A kernel without RDMA answers with an error; that is "no device" as well.
  const std::unique_ptr<ibv_device*, void (*)(ibv_device**)> list(functions_.get_device_list(&count),
                                                                  functions_.free_device_list);
  std::vector<std::string> names;
  for (int i = 0; list != nullptr && i < count && context_ == nullptr; ++i) {
    names.emplace_back(functions_.get_device_name(list.get()[i]));
    if (names.back() != name_) continue;
    errno = 0;
    context_ = functions_.open_device(list.get()[i]);
    if (context_ == nullptr) {
      fail<SystemError>("RDMA device {}: ibv_open_device: {} (needs read and write access to /dev/infiniband/uverbs*)",
                        name_, errno_text(errno));
    }
  }
  if (context_ == nullptr) {
    if (names.empty()) {
      fail<InvalidArgument>("RDMA device '{}' is not on this machine: libibverbs sees no device at all", name_);
    }
    fail<InvalidArgument>("RDMA device '{}' is not on this machine; libibverbs sees: {}", name_,
                          fmt::join(names, ", "));
  }
  try {
    const int error = functions_.query_device(context_, &limits_);
    if (error != 0) fail<SystemError>("RDMA device {}: ibv_query_device: {}", name_, errno_text(error));
    errno = 0;
    protection_domain_ = functions_.alloc_pd(context_);
    if (protection_domain_ == nullptr) {
      fail<SystemError>("RDMA device {}: ibv_alloc_pd: {}", name_, errno_text(errno));
    }
  } catch (...) {
    close();
    throw;
  }
}

Device::~Device() { close(); }

void Device::close() noexcept {
  if (protection_domain_ != nullptr && functions_.dealloc_pd(protection_domain_) != 0) {
    log::warn("RDMA device {}: ibv_dealloc_pd failed: something that was made on the device still exists", name_);
  }
  if (context_ != nullptr) functions_.close_device(context_);
}

bool Device::has_failed() {
  const std::lock_guard lock(events_mutex_);
  pollfd waiting{context_->async_fd, POLLIN, 0};
  while (!failed_ && ::poll(&waiting, 1, 0) > 0 && (waiting.revents & POLLIN) != 0) {
    ibv_async_event event{};
    if (functions_.get_async_event(context_, &event) != 0) break;
    log::warn("RDMA device {}: {}", name_, functions_.event_type_str(event.event_type));
    // An overrun completion queue loses completions for good.
    failed_ = event.event_type == IBV_EVENT_DEVICE_FATAL || event.event_type == IBV_EVENT_CQ_ERR;
    functions_.ack_async_event(&event);
  }
  return failed_;
}

ibv_port_attr Device::port(int port) const {
  ibv_port_attr attributes{};
  const int error = query_port(functions_, context_, port, &attributes);
  if (error != 0) fail<SystemError>("RDMA device {} port {}: ibv_query_port: {}", name_, port, errno_text(error));
  return attributes;
}

GidBytes Device::gid(int port, int index) const {
  ibv_gid raw{};
  errno = 0;
  if (functions_.query_gid(context_, static_cast<std::uint8_t>(port), index, &raw) != 0) {
    fail<SystemError>("RDMA device {} port {}: ibv_query_gid of index {}: {}", name_, port, index, errno_text(errno));
  }
  GidBytes result;
  std::memcpy(result.data(), raw.raw, result.size());
  return result;
}

}  // namespace deep_ep::rdma::verbs
