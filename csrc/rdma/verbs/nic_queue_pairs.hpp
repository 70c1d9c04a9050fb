// All queue pairs of a rank on its NIC.
#pragma once

#include <functional>
#include <memory>

#include "csrc/rdma/queue_pair_set.hpp"
#include "csrc/rdma/verbs/nic_access.hpp"

namespace deep_ep::rdma::verbs {

/// Opens the NIC (only where the plan has peers), registers the heap, makes queue pairs for the handler that the
/// settings ask for, exchanges their addresses and connects them. Collective; fails on all ranks when it fails on one.
std::unique_ptr<QueuePairSet> make_nic_queue_pairs(const QueuePairPlan& plan, const std::function<NicAccess()>& open);

}  // namespace deep_ep::rdma::verbs
