// A queue pair whose ring, completion entry and doorbell a GPU uses by itself: made by DevX, in memory of the caller.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "csrc/rdma/ring/ring_memory.hpp"
#include "csrc/rdma/verbs/devx/devx_device.hpp"

namespace deep_ep::rdma::verbs::devx {

class DevxQueuePair {
 public:
  /// Makes completion queue and queue pair in the memory of queue pair `i` of `rings`. That is registered as `umem`;
  /// its doorbell record as `records`, the same or other. `port_offset`: with bonded ports, consecutive offsets leave
  /// by consecutive ports. SystemError says which command was refused, and how.
  DevxQueuePair(std::shared_ptr<DevxDevice> device, const RingMemory& rings, std::size_t i, Umem umem, Umem records,
                int port_offset = 0);
  DevxQueuePair(DevxQueuePair&&) = default;
  DevxQueuePair& operator=(DevxQueuePair&&) = delete;  // the device would go before what it has made

  std::uint32_t number() const { return queue_pair_.number; }
  QueuePairAddress address() const { return device_->device->address(number()); }
  const char* memory_path() const { return umem_.path; }  ///< see register_memory()

  /// Brings the queue pair to "ready to send". RankMismatch when the two ends cannot talk.
  void connect(const QueuePairAddress& peer);
  /// Asks the device what it has done with posted entries, of which `outstanding` are not complete; the last is the one
  /// before `posted`. Empty: nothing is wrong.
  std::string trouble(std::uint64_t posted, std::uint32_t outstanding) const;

 private:
  Request request(const Command& command) const;
  void modify(const Request& request) const {
    device_->ask(queue_pair_.object.get(), device_->functions.obj_modify, request);
  }

  // In the order in which the firmware needs them; they are destroyed in the opposite order.
  std::shared_ptr<DevxDevice> device_;
  Umem umem_, records_;
  int port_offset_;
  FirmwareObject completion_queue_;
  FirmwareObject queue_pair_;
};

/// Source port of the UDP packets: the network spreads connections over its paths by it. 0xc000 to 0xffff.
std::uint16_t udp_source_port(std::uint32_t local_queue_pair, std::uint32_t remote_queue_pair);

}  // namespace deep_ep::rdma::verbs::devx
