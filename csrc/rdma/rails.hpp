// Fabrics that connect rails only: do this rank's queue pairs reach the other rails of another node?
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <string>

#include "csrc/rdma/queue_pair_address.hpp"

namespace deep_ep {
class Bootstrap;
}

namespace deep_ep::rdma {

/// Queue pairs of this rank's NIC that only try whether they reach others.
class Paths {
 public:
  virtual ~Paths() = default;
  virtual QueuePairAddress address(std::size_t path) const = 0;
  /// Throws Error where there is no route.
  virtual void connect(std::size_t path, const QueuePairAddress& peer) = 0;
  /// Sends a message and waits until the peer's NIC has answered. SystemError: it has not.
  virtual void reach(std::size_t path) = 0;
};
using MakePaths = std::function<std::unique_ptr<Paths>(std::size_t count)>;

/// Collective. Each rank sends to the rank of every other rail in the next node; nodes are of `width` consecutive
/// ranks. Path j of a rank leads to rail j of the next node, path width + j comes from rail j of the one before. Empty:
/// all have been reached. Else why one has not, the same text on all ranks.
std::string why_unreached(Bootstrap& bootstrap, int width, const MakePaths& make);

}  // namespace deep_ep::rdma
