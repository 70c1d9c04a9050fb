// A rank's NIC and those of its node on a fabric that connects rails only.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "csrc/rdma/ends.hpp"
#include "csrc/rdma/rails.hpp"
#include "csrc/rdma/verbs/nic_ends.hpp"
#include "csrc/rdma/verbs/queue_pair.hpp"

namespace deep_ep::rdma::verbs {

/// A NIC of this node on another rail, by which that rail's ranks of other nodes write to this rank's heap.
struct LandingNic {
  PathOptions path;
  HeapRegistration heap;
  std::shared_ptr<CompletionQueue> completions;
};
/// Of each rail; nothing for this rank's own.
struct LandingNics {
  std::vector<std::optional<LandingNic>> of_rail = {};
};

/// Opens the NICs of other rails and registers the heap with each. `own` says what memory that is; `places`: of each
/// rail. SystemError: one refuses.
LandingNics open_landing_nics(const NicAccess& own, std::size_t own_rail, std::span<const NicPlace> places,
                              const SymmetricHeap& heap);

/// Queue pairs that try paths: to and from the NICs of the other ranks, or where there are `landings`, over the own
/// rail into the memory of the other ranks. There must be two for each rail, see why_unreached(). An answer that does
/// not come is given up after a second or two.
std::unique_ptr<Paths> make_nic_paths(const NicAccess& own, std::size_t count, const LandingNics& landings = {});

/// The receiving end by which others write to this rank's heap.
struct Landing {
  std::unique_ptr<QueuePair> queue_pair;
  QueuePairAddress address;

  Landing(const LandingNic& nic, const PathOptions& path)
      : queue_pair(std::make_unique<QueuePair>(nic.completions, 1, path)),
        address(nic.heap.at(queue_pair->address())) {}
};

/// Of each end of a set whose peer is on another rail.
class Landings {
 public:
  /// `nics`: may be null where no end has one.
  Landings(const LandingNics* nics, int rank, const ConnectionOptions& options);
  QueuePairAddress address(std::size_t end) const { return landings_.at(end)->address; }
  void connect(std::size_t end, const QueuePairAddress& peer) { landings_.at(end)->queue_pair->connect(peer); }

 private:
  std::vector<std::optional<Landing>> landings_;
};

}  // namespace deep_ep::rdma::verbs
