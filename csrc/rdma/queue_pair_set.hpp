// What Connections are made of: all queue pairs of a rank, of one kind.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>

#include "csrc/memory/symmetric_heap.hpp"
#include "csrc/rdma/ring/failure.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep {
class Bootstrap;
class Executor;
}  // namespace deep_ep

namespace deep_ep::rdma {

struct ConnectionOptions;

/// The ends of queue pairs, their memory and their handler. Destroying it stops the handler first.
class QueuePairSet {
 public:
  virtual ~QueuePairSet() = default;

  /// What was found to have failed first, if anything has.
  virtual std::optional<Failure> failure() const = 0;
  /// Has all that kernels have posted happened at the peers? What failed never will, and counts as done. No kernel may
  /// be posting.
  virtual bool idle() const = 0;
  /// "handler cpu, wire local".
  virtual std::string describe() const = 0;
};

/// What all kinds are made from. References live during the construction only.
struct QueuePairPlan {
  Bootstrap& bootstrap;
  std::shared_ptr<Executor> executor;
  std::shared_ptr<SymmetricHeap> heap;
  const ConnectionOptions& options;
  /// To be filled in, [channels][ranks]: the entries of the options' peers.
  std::span<RdmaPeerParams> peers;

  RdmaPeerParams& peer(int channel, int rank) const;
};

/// Ranks of this host, whose heaps this process has mapped: the `cpu` handler copies between them. Collective.
std::unique_ptr<QueuePairSet> make_local_queue_pairs(const QueuePairPlan& plan);

}  // namespace deep_ep::rdma
