// A queue pair whose ring, completion entry and doorbell a GPU uses by itself: made by DevX, in memory of the caller.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "csrc/rdma/ring/ring_memory.hpp"
#include "csrc/rdma/verbs/devx/commands.hpp"
#include "csrc/rdma/verbs/devx/objects.hpp"
#include "csrc/rdma/verbs/devx/port_traits.hpp"

namespace deep_ep::rdma::verbs::devx {

/// Of the memory of a queue pair: the page size of GPUs.
inline constexpr std::size_t kRingAlignment = 65536;

struct DevxQueuePairOptions {
  RingLayout layout;  ///< aligned to kRingAlignment
  /// layout.bytes of memory, aligned likewise. The completion entry in it must say "not yet written" (all bytes 0xff)
  /// and the doorbell records must be 0 before the first kernel uses it.
  void* memory = nullptr;
  bool gpu_memory = false;
  DmaBufExporter exporter;  ///< for GPU memory; may be empty
  std::uint32_t user_index = 0;
  PortTraits traits;
  std::optional<DoorbellPage::Kind> doorbell;  ///< nothing: the best that there is
};

/// As the firmware numbers them; what is not one of the first four counts as error.
enum class QueuePairState : std::uint8_t { reset, initialised, ready_to_receive, ready_to_send, error };

std::string_view to_string(QueuePairState state);

/// Counters of the device that say what happened to posted work.
struct QueuePairProgress {
  QueuePairState state = QueuePairState::reset;
  std::uint16_t posted = 0;   ///< blocks that doorbells announced
  std::uint16_t fetched = 0;  ///< blocks that the device has read
};

class DevxQueuePair {
 public:
  /// Checks that the device can do what the rings need (completion format 1, 8-byte fetch-and-add), then makes memory
  /// registration, doorbell, completion queue and queue pair. SystemError says which command was refused, and how.
  /// The functions outlive the queue pair.
  DevxQueuePair(std::shared_ptr<Device> device, const Mlx5Functions& functions, const DevxQueuePairOptions& options,
                const PathOptions& path);

  std::uint32_t number() const { return queue_pair_.number(); }
  const QueuePairAddress& address() const { return address_; }
  const DoorbellPage& doorbell() const { return doorbell_; }
  RegistrationPath memory_path() const { return memory_.path(); }

  /// Brings the queue pair to "ready to send". RankMismatch when the two ends cannot talk.
  void connect(const QueuePairAddress& peer);
  QueuePairProgress progress() const;

 private:
  Umem register_memory(const DevxQueuePairOptions& options) const;
  std::uint32_t protection_domain() const;
  std::uint32_t event_queue() const;
  std::array<std::uint8_t, 6> mac_of(const QueuePairAddress& peer) const;
  CompletionQueueCommand completion_queue_command(const DevxQueuePairOptions& options) const;
  QueuePairCommand queue_pair_command(const DevxQueuePairOptions& options) const;

  // In the order in which the firmware needs them; they are destroyed in the opposite order.
  Context context_;
  PathOptions path_;
  PortTraits traits_;
  std::uint32_t user_index_;
  QueuePairAddress address_;
  Umem memory_;
  DoorbellPage doorbell_;
  FirmwareObject completion_queue_;
  FirmwareObject queue_pair_;
};

}  // namespace deep_ep::rdma::verbs::devx
