// Reliable-connected queue pairs made with plain verbs, on InfiniBand and RoCE, and what two ends exchange to connect.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <type_traits>

#include "csrc/rdma/verbs/device.hpp"

struct ibv_cq;
struct ibv_qp;

namespace deep_ep::rdma {
struct RdmaSettings;
}

namespace deep_ep::rdma::verbs {

/// Where a queue pair leaves the machine, and how long it tries.
struct PathOptions {
  int port = 1;
  int gid_index = 0;
  std::uint16_t pkey_index = 0;    ///< InfiniBand partition
  std::uint8_t traffic_class = 0;  ///< RoCE: DSCP in the upper six bits
  std::uint8_t service_level = 0;  ///< InfiniBand service level, RoCE priority; 0 to 15
  std::uint8_t hop_limit = 64;
  /// An unanswered packet is sent again after 4.096 us * 2^ack_timeout, retry_count times; then the queue pair fails
  /// with "transport retries exceeded". 0 to 31, 0 = wait for ever; 0 to 7. The defaults give up after 7.5 s; not 7
  /// times, because soft-RoCE takes that for "for ever".
  std::uint8_t ack_timeout = 18;
  std::uint8_t retry_count = 6;
  /// How often a peer that is not ready for a message is asked again; 7 = for ever. Writes and atomics never need it.
  std::uint8_t receiver_not_ready_retries = 7;
};

/// The defaults, with what DEEP_EP_RDMA_* variables say, and the variables of other libraries that `settings` has read.
/// InvalidArgument names a variable that is out of range.
PathOptions path_options(const RdmaSettings& settings, int port, int gid_index);

/// What one end must know of the other. Plain bytes in the byte order of the machine: all ranks share one.
struct QueuePairAddress {
  std::uint32_t format = 1;  ///< version of this struct
  std::uint32_t queue_pair = 0;
  std::uint32_t packet_number = 0;  ///< first one that this end sends
  std::uint16_t lid = 0;
  std::uint8_t mtu = 0;  ///< as PortStatus::active_mtu
  LinkLayer link_layer = LinkLayer::infiniband;
  std::uint8_t outstanding_reads_in = 0;
  std::uint8_t padding[7] = {};
  GidBytes gid{};
};
static_assert(std::is_trivially_copyable_v<QueuePairAddress> && sizeof(QueuePairAddress) == 40);

std::string to_string(const QueuePairAddress& address);

/// All but the queue pair's number. InvalidArgument for a path out of range and for an empty GID, SystemError for a
/// port that is not active.
QueuePairAddress local_address(const Device& device, const PathOptions& path);

class CompletionQueue {
 public:
  CompletionQueue(std::shared_ptr<Device> device, std::uint32_t depth);
  ~CompletionQueue();
  CompletionQueue(const CompletionQueue&) = delete;
  CompletionQueue& operator=(const CompletionQueue&) = delete;

  ibv_cq* get() const { return queue_; }
  const std::shared_ptr<Device>& device() const { return device_; }

 private:
  std::shared_ptr<Device> device_;
  ibv_cq* queue_ = nullptr;
};

enum class QueuePairState : std::uint8_t { reset, initialised, ready_to_receive, ready_to_send, draining, error };
std::string_view to_string(QueuePairState state);

struct QueuePairOptions {
  std::uint32_t send_depth = 128;
  /// Asked for; a device that has no inline sends gives a queue pair with 0.
  std::uint32_t inline_bytes = 28;
};

/// One end of a connection. Made in the state "initialised"; connect() brings it to "ready to send".
/// Peers may write, read and do atomics.
class QueuePair {
 public:
  /// Completions of what it sends go to `completions`, which it keeps alive. InvalidArgument for options out of range
  /// and for a port that is not active; SystemError says what was asked of which device.
  QueuePair(std::shared_ptr<CompletionQueue> completions, const QueuePairOptions& options, const PathOptions& path);
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  std::uint32_t number() const;
  /// For the peer's connect().
  const QueuePairAddress& address() const { return address_; }
  std::uint32_t send_depth() const { return send_depth_; }
  std::uint32_t inline_bytes() const { return inline_bytes_; }

  /// Both ends connect, in any order; a message that comes before the other end is connected is sent again.
  /// RankMismatch when the two ends cannot talk: other link layer, IPv4 GID against IPv6 GID.
  void connect(const QueuePairAddress& peer);

  /// Everything under way and posted later completes as flushed.
  void fail_on_purpose();
  /// As the device has it now.
  QueuePairState state() const;

  ibv_qp* get() const { return pair_; }
  const Device& device() const { return *completions_->device(); }

 private:
  void create(const QueuePairOptions& options);
  void initialise();
  void become_ready_to_receive(const QueuePairAddress& peer);
  void become_ready_to_send(const QueuePairAddress& peer);

  std::shared_ptr<CompletionQueue> completions_;
  PathOptions path_;
  ibv_qp* pair_ = nullptr;
  QueuePairAddress address_;
  std::uint32_t send_depth_ = 0;
  std::uint32_t inline_bytes_ = 0;
};

/// RankMismatch unless the two can be connected.
void check_compatible(const std::string& device, const QueuePairAddress& own, const QueuePairAddress& peer);

}  // namespace deep_ep::rdma::verbs
