#include "csrc/rdma/verbs/devx/devx_device.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/rdma/verbs/queue_pair.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs::devx {
namespace {

/// Returns the ports of its bond, if there is one.
std::uint8_t check(const DevxDevice& devx) {
  Request request(layout::kQueryHcaCap);
  request.set(layout::command::op_mod, layout::cmd_hca_cap::op_mod);
  const Mailbox general = devx.run(request);
  const auto version = general.get(layout::cmd_hca_cap::cqe_version);
  if (version != 1) {
    fail<SystemError>("RDMA device {} writes completion entries of version {}; kernels read version 1",
                      devx.device->name(), version);
  }
  return static_cast<std::uint8_t>(general.get(layout::cmd_hca_cap::num_lag_ports));
}

void init_obj(const DevxDevice& devx, mlx5dv_obj& objects, std::uint64_t type, const char* what) {
  const int error = devx.functions.init_obj(&objects, type);
  if (error == 0) return;
  fail<SystemError>("RDMA device {}: mlx5dv_init_obj of {}: {}", devx.device->name(), what, errno_text(error));
}

std::uint32_t find_protection_domain(const DevxDevice& devx) {
  mlx5dv_pd domain{};
  mlx5dv_obj objects{};
  objects.pd.in = devx.device->protection_domain();
  objects.pd.out = &domain;
  init_obj(devx, objects, MLX5DV_OBJ_PD, "the protection domain");
  return domain.pdn;
}

std::uint32_t find_event_queue(const DevxDevice& devx) {
  std::uint32_t number = 0;
  const int error = devx.functions.query_eqn(devx.device->context(), 0, &number);
  if (error != 0) {
    fail<SystemError>("RDMA device {}: mlx5dv_devx_query_eqn: {}", devx.device->name(), errno_text(error));
  }
  return number;
}

// The kernel knows how to reach a GID: an address handle that is made and dropped reveals the hardware address.
MacAddress find_mac(const DevxDevice& devx, const QueuePairAddress& peer) {
  const Device& device = *devx.device;
  ibv_ah_attr attributes = route_to(device, device.address(), peer);
  errno = 0;
  const std::unique_ptr<ibv_ah, int (*)(ibv_ah*)> handle(
      device.functions().create_ah(device.protection_domain(), &attributes), device.functions().destroy_ah);
  if (handle == nullptr) {
    fail<SystemError>(
        "RDMA device {}: ibv_create_ah for {}: {} (no route to the peer: wrong GID index, subnet, or a "
        "link that is down)",
        device.name(), to_string(peer), errno_text(errno));
  }
  mlx5dv_ah out{};
  mlx5dv_obj objects{};
  objects.ah.in = handle.get();
  objects.ah.out = &out;
  init_obj(devx, objects, MLX5DV_OBJ_AH, "an address handle");
  MacAddress mac{};
  std::copy_n(out.av->rmac, mac.size(), mac.begin());
  return mac;
}

/// The kernel gives one to its own queue pairs: a queue pair of verbs is made and asked. 0: it does not say.
std::uint8_t find_counter_set(const DevxDevice& devx) {
  try {
    const QueuePair pair(devx.device, make_completion_queue(devx.device, 1), 1);
    Request request(layout::kQueryQp);
    request.set(layout::queue_pair::qpn, pair.number());
    const Mailbox answer = ask(*devx.device, pair.get(), devx.functions.qp_query, request);
    return static_cast<std::uint8_t>(answer.get(layout::qpc::counter_set_id));
  } catch (const Error& error) {
    log::info("rdma: {}: losses are not counted, because: {}", devx.device->name(), error.what());
    return 0;
  }
}

/// Is the device bonded, so that its queue pairs choose between physical ports? One that does not say is taken for one
/// that is not.
bool chooses_ports(const DevxDevice& devx) {
  try {
    const Mailbox lag = devx.run(Request(layout::kQueryLag));
    return lag.get(layout::query_lag::lag_state) != 0 && lag.get(layout::query_lag::port_select_mode) == 0;
  } catch (const Error& error) {
    log::info("rdma: {}: taken for a device without bonded ports, because: {}", devx.device->name(), error.what());
    return false;
  }
}

}  // namespace

DevxDevice::DevxDevice(std::shared_ptr<Device> of, const Mlx5Functions& by, std::size_t pages)
    : device(std::move(of)),
      functions(by),
      page_bytes(pages),
      bonded_ports(check(*this)),
      protection_domain(find_protection_domain(*this)),
      event_queue(find_event_queue(*this)),
      counter_set(find_counter_set(*this)) {
  if (!chooses_ports(*this)) bonded_ports = 0;
}

Mailbox DevxDevice::run(const Request& request) const {
  return ask(*device, device->context(), functions.general_cmd, request);
}

MacAddress DevxDevice::mac_of(const QueuePairAddress& peer) {
  const auto known = macs_.find(peer.gid);
  if (known != macs_.end()) return known->second;
  return macs_[peer.gid] = find_mac(*this, peer);
}

}  // namespace deep_ep::rdma::verbs::devx
