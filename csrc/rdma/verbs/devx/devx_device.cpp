#include "csrc/rdma/verbs/devx/devx_device.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "csrc/rdma/verbs/devx/commands.hpp"
#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/rdma/verbs/queue_pair.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs::devx {
namespace {

Context checked_context(std::shared_ptr<Device> device, const Mlx5Functions& functions, std::size_t page_bytes) {
  Context context{std::move(device), &functions, page_bytes};
  const std::string& name = context.device->name();
  if (!functions.is_supported(context.device->context()->device)) {
    fail<InvalidArgument>("RDMA device {} is not an mlx5 device: GPUs cannot drive it; the NIC handler 'cpu' can",
                          name);
  }
  const auto capability = [](Field field) { return within(layout::answer::capability, field); };
  const Mailbox general = context.run("QUERY_HCA_CAP", query_capabilities_command(layout::cmd_hca_cap::op_mod),
                                      layout::answer::capability_bits);
  const auto version = general.get(capability(layout::cmd_hca_cap::cqe_version));
  if (version != 1) {
    fail<SystemError>("RDMA device {} writes completion entries of version {}; kernels read version 1", name, version);
  }
  const Mailbox atomics = context.run("QUERY_HCA_CAP", query_capabilities_command(layout::atomic_caps::op_mod),
                                      layout::answer::capability_bits);
  const auto operations = atomics.get(capability(layout::atomic_caps::atomic_operations));
  const auto sizes = atomics.get(capability(layout::atomic_caps::atomic_size_qp));
  if ((operations & layout::atomic_caps::operation_fetch_add) == 0 ||
      (sizes & layout::atomic_caps::size_8_bytes) == 0) {
    fail<SystemError>(
        "RDMA device {} has no 8-byte fetch-and-add (operations {:#x}, sizes {:#x}), which signals need; "
        "see PCI_ATOMIC_MODE in its firmware configuration",
        name, operations, sizes);
  }
  const auto order = atomics.get(capability(layout::atomic_caps::atomic_req_8b_endianness_mode));
  if (order != layout::atomic_caps::host_order) {
    fail<SystemError>(
        "RDMA device {} adds 8-byte numbers as if they were big-endian (atomic_req_8B_endianness_mode {}), so signals "
        "would be wrong: its driver has not chosen the host's order, or its firmware has none",
        name, order);
  }
  return context;
}

std::uint32_t find_protection_domain(const Context& context) {
  mlx5dv_pd domain{};
  mlx5dv_obj objects{};
  objects.pd.in = context.device->protection_domain();
  objects.pd.out = &domain;
  const int error = context.functions->init_obj(&objects, MLX5DV_OBJ_PD);
  if (error != 0) {
    fail<SystemError>("RDMA device {}: mlx5dv_init_obj of the protection domain: {}", context.device->name(),
                      errno_text(error));
  }
  return domain.pdn;
}

std::uint32_t find_event_queue(const Context& context) {
  std::uint32_t number = 0;
  const int error = context.functions->query_eqn(context.device->context(), 0, &number);
  if (error != 0) {
    fail<SystemError>("RDMA device {}: mlx5dv_devx_query_eqn: {}", context.device->name(), errno_text(error));
  }
  return number;
}

// The kernel knows how to reach a GID: an address handle that is made and dropped reveals the hardware address.
MacAddress find_mac(const Context& context, const QueuePairAddress& peer, const PathOptions& path) {
  const Device& device = *context.device;
  ibv_ah_attr attributes{};
  attributes.is_global = 1;
  attributes.port_num = static_cast<std::uint8_t>(path.port);
  attributes.sl = path.service_level;
  std::memcpy(attributes.grh.dgid.raw, peer.gid.data(), peer.gid.size());
  attributes.grh.sgid_index = static_cast<std::uint8_t>(path.gid_index);
  attributes.grh.hop_limit = path.hop_limit;
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
  const int error = context.functions->init_obj(&objects, MLX5DV_OBJ_AH);
  MacAddress mac{};
  if (error == 0) std::copy_n(out.av->rmac, mac.size(), mac.begin());
  device.functions().destroy_ah(handle);
  if (error != 0) {
    fail<SystemError>("RDMA device {}: mlx5dv_init_obj of an address handle: {}", device.name(), errno_text(error));
  }
  return mac;
}

/// The kernel gives one to its own queue pairs: a queue pair of verbs is made and asked.
std::uint8_t counter_set(const Context& context, const PathOptions& path) {
  if (context.functions->qp_query == nullptr) throw SystemError("libmlx5 has no mlx5dv_devx_qp_query");
  const QueuePair pair(std::make_shared<CompletionQueue>(context.device, 1), 1, path);
  const Mailbox command = query_queue_pair_command(pair.number());
  Mailbox answer(layout::command::context_bits);
  const int error =
      context.functions->qp_query(pair.get(), command.data(), command.size(), answer.data(), answer.size());
  if (error != 0 || answer.get(layout::answer::status) != 0) {
    fail<SystemError>("mlx5dv_devx_qp_query: {}, syndrome {:#x}", errno_text(error),
                      answer.get(layout::answer::syndrome));
  }
  return static_cast<std::uint8_t>(answer.get(within(layout::queue_pair::context, layout::qpc::counter_set_id)));
}

std::uint8_t bonded_ports(const Context& context) {
  const Mailbox lag = context.run("QUERY_LAG", query_lag_command(), layout::query_lag::bits);
  const bool by_queue = lag.get(layout::query_lag::lag_state) != 0 && lag.get(layout::query_lag::port_select_mode) == 0;
  if (!by_queue) return 0;
  const Mailbox general = context.run("QUERY_HCA_CAP", query_capabilities_command(layout::cmd_hca_cap::op_mod),
                                      layout::answer::capability_bits);
  return static_cast<std::uint8_t>(general.get(within(layout::answer::capability, layout::cmd_hca_cap::num_lag_ports)));
}

}  // namespace

DevxDevice::DevxDevice(std::shared_ptr<Device> device, const Mlx5Functions& functions, std::size_t page_bytes)
    : context_(checked_context(std::move(device), functions, page_bytes)),
      protection_domain_(find_protection_domain(context_)),
      event_queue_(find_event_queue(context_)) {}

MacAddress DevxDevice::mac_of(const QueuePairAddress& peer, const PathOptions& path) {
  const auto known = macs_.find(peer.gid);
  if (known != macs_.end()) return known->second;
  return macs_[peer.gid] = find_mac(context_, peer, path);
}

void DevxDevice::stop_counting(const std::string& why) {
  counts_ = false;
  log::warn("rdma: {}: losses and retries are not counted, because: {}", context_.device->name(), why);
}

Umem DevxDevice::register_memory(const MemoryRange& range, bool gpu_memory, const DmaBufExporter& exporter) const {
  const auto address = reinterpret_cast<std::uintptr_t>(range.address);
  if (range.address == nullptr || address % kRingAlignment != 0) {
    fail<InvalidArgument>("memory of a queue pair at {}, allowed: addresses that are multiples of 64 KiB",
                          range.address);
  }
  return gpu_memory ? Umem::of_gpu_memory(context_, range, exporter) : Umem::of_host_memory(context_, range);
}

PortTraits port_traits(const Context& context, const PathOptions& path) {
  PortTraits traits;
  try {
    traits.counter_set = counter_set(context, path);
  } catch (const Error& error) {
    log::info("rdma: {}: losses are not counted, because: {}", context.device->name(), error.what());
  }
  try {
    traits.bonded_ports = bonded_ports(context);
  } catch (const Error& error) {
    log::info("rdma: {}: taken for a device without bonded ports, because: {}", context.device->name(), error.what());
  }
  return traits;
}

}  // namespace deep_ep::rdma::verbs::devx
