// A rank's NIC and those of its node on a fabric that connects rails only.
#pragma once

#include <memory>
#include <span>

#include "csrc/rdma/connections.hpp"
#include "csrc/rdma/rails.hpp"
#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/rdma/verbs/nic_ends.hpp"

namespace deep_ep::rdma::verbs {

/// Opens the NICs of other rails, which are those of `ranks`, and registers the heap with each. SystemError: one
/// refuses.
LandingNics open_landing_nics(const NicAccess& own, std::size_t own_rail, std::span<const WireFacts> ranks,
                              const SymmetricHeap& heap, const VerbsFunctions& functions = verbs_functions());

/// Queue pairs that try paths: to and from the NICs of the other ranks, or where there are `landings`, over the own
/// rail into the memory of the other ranks. There must be two for each rail, see why_unreached(). An answer that does
/// not come is given up after a second or two.
std::unique_ptr<Paths> make_nic_paths(const WireFacts& own, std::size_t count, const LandingNics& landings = {},
                                      const VerbsFunctions& functions = verbs_functions());

}  // namespace deep_ep::rdma::verbs
