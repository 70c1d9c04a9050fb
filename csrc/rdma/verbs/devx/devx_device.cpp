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

// The kernel knows how to reach a GID: an address handle that is made and dropped reveals the hardware address.
MacAddress find_mac(const DevxDevice& devx, const QueuePairAddress& peer) {
  const Device& device = *devx.device;
  ibv_ah_attr attributes = route_to(device, device.address(), peer);
  errno = 0;
  const std::unique_ptr<ibv_ah, int (*)(ibv_ah*)> handle(
      device.functions().create_ah(device.protection_domain(), &attributes), device.functions().destroy_ah);
  require(device.name(), errno_unless(handle != nullptr), fmt::format("ibv_create_ah for {}", to_string(peer)),
          kNoRoute);
  mlx5dv_ah out{};
  mlx5dv_obj objects{};
  objects.ah.in = handle.get();
  objects.ah.out = &out;
  require(device.name(), devx.functions.init_obj(&objects, MLX5DV_OBJ_AH), "mlx5dv_init_obj of an address handle");
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
    const Device& device = *devx.device;
    const Mailbox lag = ask(device, device.context(), devx.functions.general_cmd, Request(layout::kQueryLag));
    return lag.get(layout::query_lag::lag_state) != 0 && lag.get(layout::query_lag::port_select_mode) == 0;
  } catch (const Error& error) {
    log::info("rdma: {}: taken for a device without bonded ports, because: {}", devx.device->name(), error.what());
    return false;
  }
}

}  // namespace

DevxDevice::DevxDevice(std::shared_ptr<Device> of, const Mlx5Functions& by, std::size_t pages)
    : device(std::move(of)), functions(by), page_bytes(pages) {
  Request request(layout::kQueryHcaCap);
  request.set(layout::command::op_mod, layout::cmd_hca_cap::op_mod);
  const Mailbox general = ask(*device, device->context(), functions.general_cmd, request);
  const auto version = general.get(layout::cmd_hca_cap::cqe_version);
  if (version != 1) {
    fail<SystemError>("RDMA device {} writes completion entries of version {}; kernels read version 1", device->name(),
                      version);
  }
  mlx5dv_pd domain{};
  mlx5dv_obj objects{};
  objects.pd.in = device->protection_domain();
  objects.pd.out = &domain;
  require(device->name(), functions.init_obj(&objects, MLX5DV_OBJ_PD), "mlx5dv_init_obj of the protection domain");
  protection_domain = domain.pdn;
  require(device->name(), functions.query_eqn(device->context(), 0, &event_queue), "mlx5dv_devx_query_eqn");
  counter_set = find_counter_set(*this);
  if (chooses_ports(*this)) bonded_ports = static_cast<std::uint8_t>(general.get(layout::cmd_hca_cap::num_lag_ports));
  doorbell = make_doorbell(*this);
}

MacAddress DevxDevice::mac_of(const QueuePairAddress& peer) {
  const auto known = macs_.find(peer.gid);
  if (known != macs_.end()) return known->second;
  return macs_[peer.gid] = find_mac(*this, peer);
}

std::uint64_t* DevxDevice::map_doorbell(const PageMapper& mapper) {
  auto* const reg = static_cast<std::byte*>(doorbell->reg_addr);
  const std::size_t place = reinterpret_cast<std::uintptr_t>(reg) % page_bytes;
  // Once only, as CUDA demands.
  if (mapped_page_ == nullptr) mapped_page_ = mapper(reg - place);
  return reinterpret_cast<std::uint64_t*>(static_cast<std::byte*>(mapped_page_.get()) + place);
}

}  // namespace deep_ep::rdma::verbs::devx
