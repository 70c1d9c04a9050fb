// A rank's NIC and those of its node on a fabric that connects rails only.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "csrc/rdma/ends.hpp"
#include "csrc/rdma/rails.hpp"
#include "csrc/rdma/verbs/nic_ends.hpp"
#include "csrc/rdma/verbs/queue_pair.hpp"

namespace deep_ep::rdma::verbs {

/// A NIC of this node on another rail, by which that rail's ranks of other nodes write to this rank's heap.
struct LandingNic {
  PathOptions path;
  Registration heap;
  std::shared_ptr<CompletionQueue> completions;
};
/// Of each rail; nothing for this rank's own.
struct LandingNics {
  std::vector<std::optional<LandingNic>> of_rail = {};
};

struct RailNic {
  std::shared_ptr<Device> device;
  PathOptions path;
};
/// Opens the NICs of other rails and registers the heap with each. `own` says what memory that is. SystemError: one
/// refuses.
LandingNics open_landing_nics(const NicAccess& own, int own_rail, int rails, const SymmetricHeap& heap,
                              const std::function<RailNic(int rail)>& open);

/// Queue pairs that try paths: to and from the NICs of the other ranks, or where there are `landings`, over the own
/// rail into the memory of the other ranks. There must be two for each rail, see why_unreached(). An answer that does
/// not come is given up after a second or two.
std::unique_ptr<Paths> make_nic_paths(const NicAccess& own, std::size_t count, const LandingNics& landings = {});

std::unique_ptr<Landings> make_nic_landings(const LandingNics& nics, int rank, const ConnectionOptions& options);

}  // namespace deep_ep::rdma::verbs
