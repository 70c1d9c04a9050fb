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
  const std::string& name = devx.device->name();
  if (!devx.functions.is_supported(devx.device->context()->device)) {
    fail<InvalidArgument>("RDMA device {} is not an mlx5 device: GPUs cannot drive it; the NIC handler 'cpu' can",
                          name);
  }
  const auto capabilities = [&](std::uint16_t op_mod) {
    Request request(layout::kQueryHcaCap);
    request.set(layout::command::op_mod, op_mod);
    return devx.run(request);
  };
  const Mailbox general = capabilities(layout::cmd_hca_cap::op_mod);
  const auto version = general.get(layout::cmd_hca_cap::cqe_version);
  if (version != 1) {
    fail<SystemError>("RDMA device {} writes completion entries of version {}; kernels read version 1", name, version);
  }
  const Mailbox atomics = capabilities(layout::atomic_caps::op_mod);
  const auto operations = atomics.get(layout::atomic_caps::atomic_operations);
  const auto sizes = atomics.get(layout::atomic_caps::atomic_size_qp);
  if ((operations & layout::atomic_caps::operation_fetch_add) == 0 ||
      (sizes & layout::atomic_caps::size_8_bytes) == 0) {
    fail<SystemError>(
        "RDMA device {} has no 8-byte fetch-and-add (operations {:#x}, sizes {:#x}), which signals need; "
        "see PCI_ATOMIC_MODE in its firmware configuration",
        name, operations, sizes);
  }
  const auto order = atomics.get(layout::atomic_caps::atomic_req_8b_endianness_mode);
  if (order != layout::atomic_caps::host_order) {
    fail<SystemError>(
        "RDMA device {} adds 8-byte numbers as if they were big-endian (atomic_req_8B_endianness_mode {}), so signals "
        "would be wrong: its driver has not chosen the host's order, or its firmware has none",
        name, order);
  }
  return static_cast<std::uint8_t>(general.get(layout::cmd_hca_cap::num_lag_ports));
}

std::uint32_t find_protection_domain(const DevxDevice& devx) {
  mlx5dv_pd domain{};
  mlx5dv_obj objects{};
  objects.pd.in = devx.device->protection_domain();
  objects.pd.out = &domain;
  const int error = devx.functions.init_obj(&objects, MLX5DV_OBJ_PD);
  if (error != 0) {
    fail<SystemError>("RDMA device {}: mlx5dv_init_obj of the protection domain: {}", devx.device->name(),
                      errno_text(error));
  }
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
  const PathOptions& path = device.path();
  ibv_ah_attr attributes{};
  attributes.is_global = 1;
  attributes.port_num = static_cast<std::uint8_t>(path.port);
  attributes.sl = path.service_level;
  std::memcpy(attributes.grh.dgid.raw, peer.gid.data(), peer.gid.size());
  attributes.grh.sgid_index = static_cast<std::uint8_t>(path.gid_index);
  attributes.grh.hop_limit = kHopLimit;
  attributes.grh.traffic_class = path.traffic_class;
  errno = 0;
  ibv_ah* handle = device.functions().create_ah(device.protection_domain(), &attributes);
  if (handle == nullptr) {
    fail<SystemError>(
        "RDMA device {}: ibv_create_ah for {}: {} (no route to the peer: wrong GID index, subnet, or a "
        "link that is down)",
        device.name(), to_string(peer), errno_text(errno));
  }
  mlx5dv_ah out{};
  mlx5dv_obj objects{};
  objects.ah.in = handle;
  objects.ah.out = &out;
  const int error = devx.functions.init_obj(&objects, MLX5DV_OBJ_AH);
  MacAddress mac{};
  if (error == 0) std::copy_n(out.av->rmac, mac.size(), mac.begin());
  device.functions().destroy_ah(handle);
  if (error != 0) {
    fail<SystemError>("RDMA device {}: mlx5dv_init_obj of an address handle: {}", device.name(), errno_text(error));
  }
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
      address(local_address(*device)),
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
