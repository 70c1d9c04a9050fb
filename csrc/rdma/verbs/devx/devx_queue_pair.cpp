#include "csrc/rdma/verbs/devx/devx_queue_pair.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs::devx {
std::string_view state_name(std::uint64_t state) {
  constexpr std::array<std::string_view, 4> kNames = {"reset", "initialised", "ready to receive", "ready to send"};
  return state < kNames.size() ? kNames[state] : "error";
}

DevxQueuePair::DevxQueuePair(std::shared_ptr<DevxDevice> device, QueueMemory memory, int port_offset)
    : device_(std::move(device)),
      memory_(std::move(memory)),
      port_offset_(port_offset),
      address_(device_->address),
      doorbell_(make_doorbell(*device_)),
      completion_queue_(device_, "CREATE_CQ",
                        create_completion_queue_command(memory_, doorbell_->page_id, device_->event_queue)),
      queue_pair_(device_, "CREATE_QP",
                  create_queue_pair_command(memory_, doorbell_->page_id, device_->protection_domain,
                                            completion_queue_.number())) {
  address_.queue_pair = queue_pair_.number();
}

void* DevxQueuePair::doorbell() const { return doorbell_->reg_addr; }

void DevxQueuePair::connect(const QueuePairAddress& peer) {
  check_compatible(device_->device->name(), address_, peer);
  const MacAddress mac = address_.link_layer == LinkLayer::ethernet ? device_->mac_of(peer) : MacAddress{};
  const int ports = device_->bonded_ports;
  const auto physical_port = static_cast<std::uint8_t>(ports > 1 ? 1 + port_offset_ % ports : 0);
  const auto initialise = [&](std::uint8_t counter_set) {
    queue_pair_.modify("RST2INIT_QP",
                       reset_to_init_command(device_->device->path(), address_, counter_set, physical_port));
  };
  try {
    initialise(device_->counter_set);
  } catch (const SystemError& error) {
    if (device_->counter_set == 0) throw;
    device_->counter_set = 0;
    log::warn("rdma: {}: losses and retries are not counted, because: {}", device_->device->name(), error.what());
    initialise(0);
  }
  queue_pair_.modify("INIT2RTR_QP", init_to_ready_to_receive_command(device_->device->path(), address_, peer, mac));
  const int most = device_->device->limits().max_qp_init_rd_atom;
  queue_pair_.modify("RTR2RTS_QP", ready_to_send_command(device_->device->path(), address_,
                                                         std::min<int>(most, peer.outstanding_reads_in)));
}

QueuePairProgress DevxQueuePair::progress() const {
  const Mailbox answer =
      queue_pair_.query("QUERY_QP", query_queue_pair_command(number()), layout::command::context_bits);
  const auto value = [&](Field field) { return answer.get(within(layout::queue_pair::context, field)); };
  QueuePairProgress progress;
  progress.state = value(layout::qpc::state);
  progress.posted = static_cast<std::uint16_t>(value(layout::qpc::sw_sq_wqebb_counter));
  progress.fetched = static_cast<std::uint16_t>(value(layout::qpc::hw_sq_wqebb_counter));
  return progress;
}

}  // namespace deep_ep::rdma::verbs::devx
