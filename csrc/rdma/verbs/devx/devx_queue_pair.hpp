// A queue pair whose ring, completion entry and doorbell a GPU uses by itself: made by DevX, in memory of the caller.
#pragma once

#include <cstdint>
#include <memory>

#include "csrc/rdma/verbs/devx/commands.hpp"
#include "csrc/rdma/verbs/devx/devx_device.hpp"
#include "csrc/rdma/verbs/devx/objects.hpp"

namespace deep_ep::rdma::verbs::devx {

/// Of the states that the firmware numbers.
inline constexpr std::uint64_t kReadyToSend = 3;
std::string_view state_name(std::uint64_t state);

/// Counters of the device that say what happened to posted work.
struct QueuePairProgress {
  std::uint64_t state = 0;
  std::uint16_t posted = 0;   ///< blocks that doorbells announced
  std::uint16_t fetched = 0;  ///< blocks that the device has read
};

class DevxQueuePair {
 public:
  /// Makes doorbell, completion queue and queue pair. `port_offset`: with bonded ports, consecutive offsets leave by
  /// consecutive ports. SystemError says which command was refused, and how.
  DevxQueuePair(std::shared_ptr<DevxDevice> device, QueueMemory memory, int port_offset = 0);

  std::uint32_t number() const { return queue_pair_.number(); }
  const QueuePairAddress& address() const { return address_; }
  void* doorbell() const;
  RegistrationPath memory_path() const { return memory_.umem.path(); }

  /// Brings the queue pair to "ready to send". RankMismatch when the two ends cannot talk.
  void connect(const QueuePairAddress& peer);
  QueuePairProgress progress() const;

 private:
  // In the order in which the firmware needs them; they are destroyed in the opposite order.
  std::shared_ptr<DevxDevice> device_;
  QueueMemory memory_;
  int port_offset_;
  QueuePairAddress address_;
  std::shared_ptr<mlx5dv_devx_uar> doorbell_;
  FirmwareObject completion_queue_;
  FirmwareObject queue_pair_;
};

}  // namespace deep_ep::rdma::verbs::devx
