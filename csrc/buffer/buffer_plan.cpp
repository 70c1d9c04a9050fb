#include "csrc/buffer/buffer_plan.hpp"

#include "csrc/buffer/internode/lanes.hpp"
#include "kernels/internode/params.hpp"
#include "kernels/low_latency/params.hpp"

namespace deep_ep {

rdma::ConnectionOptions low_latency_connections(const LowLatencyReach& reach) {
  rdma::ConnectionOptions options;
  options.peers = reach.far;
  options.channels = low_latency_channels(reach.lanes);
  // Dispatch and combine of two halves of a batch run at the same time, as lanes do.
  options.port_offsets.resize(static_cast<std::size_t>(options.channels));
  const auto offset_of = [&](int channel) -> int& { return options.port_offsets[static_cast<std::size_t>(channel)]; };
  for (int lane = 0; lane < reach.lanes; ++lane) {
    offset_of(channel_of(LowLatencyKind::dispatch, lane)) = lane;
    offset_of(channel_of(LowLatencyKind::combine, lane)) = lane + 1;
  }
  options.long_messages = false;
  return options;
}

rdma::ConnectionOptions internode_connections(const NodeGrid& grid, int lanes) {
  rdma::ConnectionOptions options;
  options.channels = lanes * static_cast<int>(InternodeChannel::count);
  for (int lane = 0; lane < lanes; ++lane)
    options.port_offsets.insert(options.port_offsets.end(), {lane, lane + 1});  // rows, credit
  options.depth = internode_depth(lanes);
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
  if (options.internode.lanes != 0) plan.internode_lanes = options.internode.lanes;
  if (!plan.reach.far.empty()) plan.layout.add_staging(plan.reach.rail_width == 0 ? 0 : nodes.num_nodes);
  if (plan.grid.width != 0) plan.layout.add_internode(plan.grid, options.max_local_experts);
  return plan;
}

std::array<rdma::ConnectionOptions, 2> BufferPlan::connections() const {
  return {low_latency_connections(reach), internode_connections(grid, internode_lanes)};
}

std::size_t BufferPlan::queue_pairs() const {
  std::size_t pairs = 0;
  for (const rdma::ConnectionOptions& options : connections()) {
    pairs += options.peers.size() * static_cast<std::size_t>(options.channels);
  }
  return pairs;
}

}  // namespace deep_ep
