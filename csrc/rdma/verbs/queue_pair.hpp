// Reliable-connected queue pairs made with plain verbs, on InfiniBand and RoCE.
#pragma once

#include <cstdint>
#include <memory>

#include "csrc/rdma/discovery/settings.hpp"
#include "csrc/rdma/verbs/device.hpp"

struct ibv_cq;
struct ibv_qp;

namespace deep_ep::rdma::verbs {

/// All but the queue pair's number. InvalidArgument for an empty GID, SystemError for a port that is not active.
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

/// One end of a connection. Made in the state "initialised"; connect() brings it to "ready to send".
/// Peers may write and do atomics.
class QueuePair {
 public:
  /// Completions of what it sends go to `completions`, which it keeps alive. Errors of local_address(); SystemError
  /// says what was asked of which device.
  QueuePair(std::shared_ptr<CompletionQueue> completions, std::uint32_t send_depth, const PathOptions& path);
  ~QueuePair();
  QueuePair(const QueuePair&) = delete;
  QueuePair& operator=(const QueuePair&) = delete;

  std::uint32_t number() const;
  /// For the peer's connect().
  const QueuePairAddress& address() const { return address_; }
  std::uint32_t send_depth() const { return send_depth_; }

  /// Both ends connect, in any order; a message that comes before the other end is connected is sent again.
  /// RankMismatch when the two ends cannot talk: other link layer, IPv4 GID against IPv6 GID.
  void connect(const QueuePairAddress& peer);

  ibv_qp* get() const { return pair_; }
  const Device& device() const { return *completions_->device(); }

 private:
  void create();
  void initialise();
  void become_ready_to_receive(const QueuePairAddress& peer);
  void become_ready_to_send(const QueuePairAddress& peer);

  std::shared_ptr<CompletionQueue> completions_;
  PathOptions path_;
  ibv_qp* pair_ = nullptr;
  QueuePairAddress address_;
  std::uint32_t send_depth_;
};

}  // namespace deep_ep::rdma::verbs
