#include "csrc/buffer/buffer_plan.hpp"

#include "kernels/internode/params.hpp"
#include "kernels/low_latency/params.hpp"

namespace deep_ep {

rdma::ConnectionOptions low_latency_connections(const LowLatencyReach& reach) {
  rdma::ConnectionOptions options;
  options.peers = reach.far;
  options.channels = low_latency_channels(reach.lanes);
  return options;
}

rdma::ConnectionOptions internode_connections(const NodeGrid& grid) {
  rdma::ConnectionOptions options;
  options.channels = static_cast<int>(InternodeChannel::count);
  if (grid.width == 0) return options;
  for (int number = 0; number < grid.others(); ++number) options.peers.push_back(grid.rail_in(grid.other(number)));
  return options;
}

BufferPlan BufferPlan::make(const BufferOptions& options, const NodeMembership& nodes) {
  const int num_ranks = static_cast<int>(nodes.node.size());
  BufferPlan plan;
  plan.layout = HeapLayout::make(options, num_ranks);
  plan.reach = LowLatencyReach::find(options, nodes);
  plan.grid = {nodes.rank, num_ranks, nodes.ranks_of_each_node()};
  if (!plan.reach.far.empty()) plan.layout.add_staging(plan.reach.rail_width == 0 ? 0 : nodes.num_nodes);
  if (plan.grid.width != 0) plan.layout.add_internode(plan.grid, options.max_local_experts);
  return plan;
}

std::size_t BufferPlan::queue_pairs() const {
  std::size_t pairs = 0;
  for (const rdma::ConnectionOptions& options : {low_latency_connections(reach), internode_connections(grid)}) {
    pairs += options.peers.size() * static_cast<std::size_t>(options.channels);
  }
  return pairs;
}

}  // namespace deep_ep
