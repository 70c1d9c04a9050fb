#include "csrc/rdma/verbs/devx/devx_queue_pair.hpp"

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <utility>

#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs::devx {
namespace {

std::uint32_t log2_down(std::uint32_t value) { return value == 0 ? 0 : std::bit_width(value) - 1U; }

Context checked_context(std::shared_ptr<Device> device, const Mlx5Functions& functions) {
  Context context{std::move(device), &functions};
  const std::string& name = context.device->name();
  if (!functions.is_supported(context.device->context()->device)) {
    fail<InvalidArgument>("RDMA device {} is not an mlx5 device: GPUs cannot drive it; the NIC handler 'cpu' can",
                          name);
  }
  namespace layout = devx::layout;
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
  return context;
}

}  // namespace

std::string_view to_string(QueuePairState state) {
  switch (state) {
    case QueuePairState::reset:
      return "reset";
    case QueuePairState::initialised:
      return "initialised";
    case QueuePairState::ready_to_receive:
      return "ready to receive";
    case QueuePairState::ready_to_send:
      return "ready to send";
    case QueuePairState::error:
      break;
  }
  return "error";
}

DevxQueuePair::DevxQueuePair(std::shared_ptr<Device> device, const Mlx5Functions& functions,
                             const DevxQueuePairOptions& options, const PathOptions& path)
    : context_(checked_context(std::move(device), functions)),
      path_(path),
      traits_(options.traits),
      user_index_(options.user_index),
      address_(local_address(*context_.device, path)),
      memory_(register_memory(options)),
      doorbell_(context_, options.doorbell),
      completion_queue_(context_, "CREATE_CQ", create_completion_queue_command(completion_queue_command(options))),
      queue_pair_(context_, "CREATE_QP", create_queue_pair_command(queue_pair_command(options))) {
  address_.queue_pair = queue_pair_.number();
}

Umem DevxQueuePair::register_memory(const DevxQueuePairOptions& options) const {
  const auto address = reinterpret_cast<std::uintptr_t>(options.memory);
  if (options.memory == nullptr || address % kRingAlignment != 0) {
    fail<InvalidArgument>("memory of a queue pair at {}, allowed: addresses that are multiples of 64 KiB",
                          options.memory);
  }
  const MemoryRange range{.address = options.memory, .bytes = options.layout.bytes};
  return options.gpu_memory ? Umem::of_gpu_memory(context_, range, options.exporter)
                            : Umem::of_host_memory(context_, range);
}

std::uint32_t DevxQueuePair::protection_domain() const {
  mlx5dv_pd domain{};
  mlx5dv_obj objects{};
  objects.pd.in = context_.device->protection_domain();
  objects.pd.out = &domain;
  const int error = context_.functions->init_obj(&objects, MLX5DV_OBJ_PD);
  if (error != 0) {
    fail<SystemError>("RDMA device {}: mlx5dv_init_obj of the protection domain: {}", context_.device->name(),
                      errno_text(error));
  }
  return domain.pdn;
}

std::uint32_t DevxQueuePair::event_queue() const {
  std::uint32_t number = 0;
  const int error = context_.functions->query_eqn(context_.device->context(), 0, &number);
  if (error != 0) {
    fail<SystemError>("RDMA device {}: mlx5dv_devx_query_eqn: {}", context_.device->name(), errno_text(error));
  }
  return number;
}

CompletionQueueCommand DevxQueuePair::completion_queue_command(const DevxQueuePairOptions& options) const {
  CompletionQueueCommand command;
  command.entry = {memory_.id(), options.layout.completion};
  command.doorbell_record = {memory_.id(), options.layout.unused_record};
  command.event_queue = event_queue();
  command.uar_page = doorbell_.page_id();
  return command;
}

QueuePairCommand DevxQueuePair::queue_pair_command(const DevxQueuePairOptions& options) const {
  QueuePairCommand command;
  command.ring = {memory_.id(), 0};
  command.doorbell_record = {memory_.id(), options.layout.doorbell};
  command.log_depth = log2_down(options.layout.depth);
  command.protection_domain = protection_domain();
  command.completion_queue = completion_queue_.number();
  command.uar_page = doorbell_.page_id();
  command.user_index = options.user_index;
  return command;
}

// The kernel knows how to reach a GID: an address handle that is made and dropped reveals the hardware address.
std::array<std::uint8_t, 6> DevxQueuePair::mac_of(const QueuePairAddress& peer) const {
  const Device& device = *context_.device;
  ibv_ah_attr attributes{};
  attributes.is_global = 1;
  attributes.port_num = static_cast<std::uint8_t>(path_.port);
  attributes.sl = path_.service_level;
  std::memcpy(attributes.grh.dgid.raw, peer.gid.data(), peer.gid.size());
  attributes.grh.sgid_index = static_cast<std::uint8_t>(path_.gid_index);
  attributes.grh.hop_limit = path_.hop_limit;
  attributes.grh.traffic_class = path_.traffic_class;
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
  const int error = context_.functions->init_obj(&objects, MLX5DV_OBJ_AH);
  std::array<std::uint8_t, 6> mac{};
  if (error == 0) std::copy_n(out.av->rmac, mac.size(), mac.begin());
  device.functions().destroy_ah(handle);
  if (error != 0) {
    fail<SystemError>("RDMA device {}: mlx5dv_init_obj of an address handle: {}", device.name(), errno_text(error));
  }
  return mac;
}

void DevxQueuePair::connect(const QueuePairAddress& peer) {
  check_compatible(context_.device->name(), address_, peer);
  ConnectionCommand command;
  command.queue_pair = number();
  command.path = path_;
  command.own = address_;
  command.peer = peer;
  if (address_.link_layer == LinkLayer::ethernet) command.peer_mac = mac_of(peer);
  const DeviceLimits& limits = context_.device->limits();
  command.log_outstanding_out = log2_down(std::min(limits.outstanding_reads_out, peer.outstanding_reads_in));
  command.log_outstanding_in = log2_down(limits.outstanding_reads_in);
  command.counter_set = traits_.counter_set;
  // Queue pairs of one peer have neighbouring numbers or numbers far apart: either way both ports get some.
  if (traits_.bonded_ports > 1)
    command.physical_port = static_cast<std::uint8_t>(1 + user_index_ % traits_.bonded_ports);
  queue_pair_.modify("RST2INIT_QP", reset_to_init_command(command));
  queue_pair_.modify("INIT2RTR_QP", init_to_ready_to_receive_command(command));
  queue_pair_.modify("RTR2RTS_QP", ready_to_send_command(command));
}

QueuePairProgress DevxQueuePair::progress() const {
  const Mailbox answer =
      queue_pair_.query("QUERY_QP", query_queue_pair_command(number()), layout::command::context_bits);
  const auto value = [&](Field field) { return answer.get(within(layout::queue_pair::context, field)); };
  QueuePairProgress progress;
  const auto state = value(layout::qpc::state);
  progress.state = state <= static_cast<std::uint64_t>(QueuePairState::ready_to_send)
                       ? static_cast<QueuePairState>(state)
                       : QueuePairState::error;
  progress.posted = static_cast<std::uint16_t>(value(layout::qpc::sw_sq_wqebb_counter));
  progress.fetched = static_cast<std::uint16_t>(value(layout::qpc::hw_sq_wqebb_counter));
  return progress;
}

}  // namespace deep_ep::rdma::verbs::devx
