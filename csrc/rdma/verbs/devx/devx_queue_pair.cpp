#include "csrc/rdma/verbs/devx/devx_queue_pair.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs::devx {
namespace {

std::uint32_t log2_down(std::uint32_t value) { return value == 0 ? 0 : std::bit_width(value) - 1U; }

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

DevxQueuePair::DevxQueuePair(std::shared_ptr<DevxDevice> device, std::shared_ptr<const Umem> memory,
                             const DevxQueuePairOptions& options, const PathOptions& path)
    : device_(std::move(device)),
      memory_(std::move(memory)),
      path_(path),
      traits_(options.traits),
      port_offset_(options.port_offset),
      address_(local_address(*device_->context().device, path)),
      doorbell_(device_->context(), options.doorbell),
      completion_queue_(
          device_->context(), "CREATE_CQ",
          create_completion_queue_command(memory_of(options), doorbell_.page_id(), device_->event_queue())),
      queue_pair_(device_->context(), "CREATE_QP",
                  create_queue_pair_command(memory_of(options), doorbell_.page_id(), device_->protection_domain(),
                                            completion_queue_.number(), options.user_index)) {
  address_.queue_pair = queue_pair_.number();
}

QueueMemory DevxQueuePair::memory_of(const DevxQueuePairOptions& options) const {
  return {memory_->id(), memory_->page_bytes(), options.offset, options.layout};
}

void DevxQueuePair::connect(const QueuePairAddress& peer) {
  check_compatible(device_->context().device->name(), address_, peer);
  ConnectionCommand command;
  command.queue_pair = number();
  command.path = path_;
  command.own = address_;
  command.peer = peer;
  if (address_.link_layer == LinkLayer::ethernet) command.peer_mac = device_->mac_of(peer, path_);
  const DeviceLimits& limits = device_->context().device->limits();
  command.log_outstanding_out = log2_down(std::min(limits.outstanding_reads_out, peer.outstanding_reads_in));
  command.log_outstanding_in = log2_down(limits.outstanding_reads_in);
  if (device_->counts()) command.counter_set = traits_.counter_set;
  if (traits_.bonded_ports > 1)
    command.physical_port = static_cast<std::uint8_t>(1 + port_offset_ % traits_.bonded_ports);
  try {
    queue_pair_.modify("RST2INIT_QP", reset_to_init_command(command));
  } catch (const SystemError& error) {
    if (command.counter_set == 0) throw;
    device_->stop_counting(error.what());
    command.counter_set = 0;
    queue_pair_.modify("RST2INIT_QP", reset_to_init_command(command));
  }
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
