#include "csrc/rdma/verbs/devx/devx_device.hpp"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "csrc/rdma/verbs/queue_pair.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep::rdma::verbs::devx {
namespace {

constexpr std::uint64_t kUmemMaskDmabuf = 1;  // older headers lack it

/// The kernel gives one to its own queue pairs: a queue pair of verbs is made and asked. 0: it does not say.
std::uint8_t find_counter_set(const DevxDevice& devx) try {
  const QueuePair pair(devx.device);
  Request request(layout::kQueryQp);
  request.set(layout::queue_pair::qpn, pair.number());
  return static_cast<std::uint8_t>(
      devx.ask(pair.get(), devx.functions.qp_query, request).get(layout::qpc::counter_set_id));
} catch (const Error& error) {
  log::info("rdma: {}: losses are not counted, because: {}", devx.device->name(), error.what());
  return 0;
}

/// Is the device bonded, so that its queue pairs choose between physical ports? One that does not say is taken for one
/// that is not.
bool chooses_ports(const DevxDevice& devx) try {
  const Mailbox lag = devx.ask(devx.device->context(), devx.functions.general_cmd, Request(layout::kQueryLag));
  return lag.get(layout::query_lag::lag_state) != 0 && lag.get(layout::query_lag::port_select_mode) == 0;
} catch (const Error& error) {
  log::info("rdma: {}: taken for a device without bonded ports, because: {}", devx.device->name(), error.what());
  return false;
}

std::shared_ptr<mlx5dv_devx_uar> find_doorbell(const DevxDevice& devx) {
  std::string answers;
  for (const auto& [flags, name] : {std::pair(MLX5DV_UAR_ALLOC_TYPE_NC, "uncached register"),
                                    std::pair(MLX5DV_UAR_ALLOC_TYPE_BF, "write-combining register")}) {
    errno = 0;
    mlx5dv_devx_uar* const made = devx.functions.alloc_uar(devx.device->context(), static_cast<std::uint32_t>(flags));
    if (made != nullptr) return {made, devx.functions.free_uar};
    answers += fmt::format("{}{}: {}", answers.empty() ? "" : "; ", name, errno_text(errno));
  }
  fail<SystemError>("RDMA device {}: mlx5dv_devx_alloc_uar gives no doorbell register. Tried: {}", devx.device->name(),
                    answers);
}

}  // namespace

DevxDevice::DevxDevice(std::shared_ptr<Device> of, const Mlx5Functions& by, std::size_t pages)
    : device(std::move(of)), functions(by), page_bytes(pages) {
  Request request(layout::kQueryHcaCap);
  request.set(layout::command::op_mod, layout::cmd_hca_cap::op_mod);
  const Mailbox general = ask(device->context(), functions.general_cmd, request);
  const auto version = general.get(layout::cmd_hca_cap::cqe_version);
  if (version != 1) {
    fail<SystemError>("RDMA device {} writes completion entries of version {}; kernels read version 1", device->name(),
                      version);
  }
  mlx5dv_pd domain{};
  mlx5dv_obj objects{};
  objects.pd.in = device->protection_domain();
  objects.pd.out = &domain;
  device->require(functions.init_obj(&objects, MLX5DV_OBJ_PD), "mlx5dv_init_obj of the protection domain");
  protection_domain = domain.pdn;
  device->require(functions.query_eqn(device->context(), 0, &event_queue), "mlx5dv_devx_query_eqn");
  counter_set = find_counter_set(*this);
  if (chooses_ports(*this)) bonded_ports = static_cast<std::uint8_t>(general.get(layout::cmd_hca_cap::num_lag_ports));
  doorbell = find_doorbell(*this);
}

void DevxDevice::refuse(const Command& command, int error, const Mailbox& answer) const {
  const auto status = answer.get(layout::answer::status);
  std::string firmware;
  if (status != 0) {
    firmware =
        fmt::format("; the firmware says status {:#x}, syndrome {:#x}", status, answer.get(layout::answer::syndrome));
  }
  const char* hint = error == EPERM || error == EOPNOTSUPP ? " (DevX is refused: the driver is too old, or the process "
                                                             "may not use it)"
                                                           : "";
  fail<SystemError>("RDMA device {}: DevX {}: {}{}{}", device->name(), command.name, errno_text(error), hint, firmware);
}

FirmwareObject DevxDevice::create(const Request& request) const {
  Mailbox answer(request.command.answer_bits);
  errno = 0;
  mlx5dv_devx_obj* const made =
      functions.obj_create(device->context(), request.data(), request.size(), answer.data(), answer.size());
  if (made == nullptr) refuse(request.command, errno, answer);
  return {device->owned(made, functions.obj_destroy, "mlx5dv_devx_obj_destroy"),
          static_cast<std::uint32_t>(answer.get(layout::answer::number))};
}

Umem DevxDevice::add_memory(const MemoryRange& range) const {
  mlx5dv_devx_umem* made = nullptr;
  const char* const path = register_memory(device->name(), range, "mlx5dv_devx_umem_reg_ex", [&](int dma_buf) {
    mlx5dv_devx_umem_in request{};
    request.addr = range.address;
    request.size = range.bytes;
    request.access = IBV_ACCESS_LOCAL_WRITE;
    request.pgsz_bitmap = page_bytes;
    if (dma_buf >= 0) {
      request.addr = nullptr;  // an offset into the dma-buf
      request.comp_mask = kUmemMaskDmabuf;
      request.dmabuf_fd = dma_buf;
    }
    made = functions.umem_reg_ex(device->context(), &request);
    return made != nullptr;
  });
  return {device->owned(made, functions.umem_dereg, "mlx5dv_devx_umem_dereg"), path,
          static_cast<const std::byte*>(range.address)};
}

// The kernel knows how to reach a GID: an address handle that is made and dropped reveals the hardware address.
MacAddress DevxDevice::mac_of(const QueuePairAddress& peer) {
  if (const auto known = macs_.find(peer.gid); known != macs_.end()) return known->second;
  ibv_ah_attr attributes = route_to(*device, peer);
  errno = 0;
  const std::unique_ptr<ibv_ah, int (*)(ibv_ah*)> handle(
      device->functions().create_ah(device->protection_domain(), &attributes), device->functions().destroy_ah);
  device->require(errno_unless(handle != nullptr), fmt::format("ibv_create_ah for {}", to_string(peer)), kNoRoute);
  mlx5dv_ah out{};
  mlx5dv_obj objects{};
  objects.ah.in = handle.get();
  objects.ah.out = &out;
  device->require(functions.init_obj(&objects, MLX5DV_OBJ_AH), "mlx5dv_init_obj of an address handle");
  MacAddress& mac = macs_[peer.gid];
  std::copy_n(out.av->rmac, mac.size(), mac.begin());
  return mac;
}

std::uint64_t* DevxDevice::map_doorbell(const PageMapper& mapper) {
  auto* const reg = static_cast<std::byte*>(doorbell->reg_addr);
  const std::size_t place = reinterpret_cast<std::uintptr_t>(reg) % page_bytes;
  // Once only, as CUDA demands.
  if (mapped_page_ == nullptr) mapped_page_ = mapper(reg - place);
  return reinterpret_cast<std::uint64_t*>(static_cast<std::byte*>(mapped_page_.get()) + place);
}

}  // namespace deep_ep::rdma::verbs::devx
