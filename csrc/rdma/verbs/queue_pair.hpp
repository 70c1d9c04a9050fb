// Reliable-connected queue pairs made with plain verbs, on InfiniBand and RoCE.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "csrc/rdma/verbs/device.hpp"

namespace deep_ep::rdma::verbs {

std::string to_string(const QueuePairAddress& address);

/// The way from the device to the peer's.
ibv_ah_attr route_to(const Device& device, const QueuePairAddress& peer);

/// The attributes that a queue pair of the device gets between "initialised" and "ready to send", by either interface;
/// the state itself is not filled in. RankMismatch when the two ends cannot talk: other link layer, IPv4 GID against
/// IPv6 GID. `hasty`: it gives up what is not answered after a second or two.
ibv_qp_attr connection_to(const Device& device, const QueuePairAddress& peer, bool hasty = false);

/// One end of a connection. Made in the state "initialised"; connect() brings it to "ready to send".
/// Peers may write and do atomics.
class QueuePair {
 public:
  /// Completions of what it sends go to `completions`; without one it sends nothing. SystemError says what was asked of
  /// which device.
  explicit QueuePair(std::shared_ptr<Device> device, ibv_cq* completions = nullptr, std::uint32_t send_depth = 1);
  QueuePair(QueuePair&&) = default;
  QueuePair& operator=(QueuePair&&) = delete;  // the device would go before what it has made

  std::uint32_t number() const { return pair_->qp_num; }
  /// For the peer's connect().
  QueuePairAddress address() const { return device_->address(number()); }

  /// Both ends connect, in any order; a message that comes before the other end is connected is sent again. See
  /// connection_to().
  void connect(const QueuePairAddress& peer, bool hasty = false) const;

  ibv_qp* get() const { return pair_.get(); }

 private:
  void modify(ibv_qp_attr& attributes, int mask, const std::string& step) const;

  std::shared_ptr<Device> device_;
  std::shared_ptr<ibv_qp> pair_;
};

}  // namespace deep_ep::rdma::verbs
