#include "csrc/buffer/buffer_plan.hpp"

#include <algorithm>
#include <bit>

#include "csrc/buffer/options.hpp"
#include "csrc/support/format.hpp"
#include "kernels/low_latency/params.hpp"
#include "kernels/normal/params.hpp"

namespace deep_ep {
BufferPlan BufferPlan::make(const BufferOptions& asked, const NodeMembership& nodes) {
  const int num_ranks = static_cast<int>(nodes.node.size());
  BufferPlan plan{.options = asked, .nodes = nodes};
  BufferOptions& options = plan.options;
  if (nodes.num_nodes > 1 && options.internode.heap_bytes != 0) {
    options.heap_bytes = options.internode.heap_bytes;
    options.window_bytes = 0;
  }
  const int width = nodes.ranks_of_each_node();
  plan.grid = {nodes.rank, num_ranks, width == 0 ? num_ranks : width};
  HeapLayout& layout = plan.layout;
  layout.window_bytes =
      options.window_bytes != 0 ? options.window_bytes : std::min(options.heap_bytes / 4, std::size_t{1} << 30);
  layout.window_bytes = layout.window_bytes / kLine * kLine;
  layout.arena_bytes = options.heap_bytes - layout.window_bytes;
  constexpr std::size_t kSmallestRow = 128, kMostWindowTokens = 8192;
  const std::size_t tokens = layout.window_bytes / (kSmallestRow * static_cast<std::size_t>(num_ranks));
  layout.control = {plan.grid, options.max_local_experts,
                    static_cast<int>(std::clamp<std::size_t>(tokens, 2, kMostWindowTokens))};
  layout.low_latency = LowLatencyWindow::make(layout.low_latency_at(), options.low_latency.bytes, num_ranks,
                                              options.max_local_experts, rest_bits_of(options.low_latency.sums));
  if (options.low_latency.bytes != 0 && layout.low_latency.slots == 0) {
    fail<InvalidArgument>(
        "low_latency.bytes is {}, which does not even hold a token of each of {} ranks: see "
        "Buffer::low_latency_bytes_hint",
        options.low_latency.bytes, num_ranks);
  }
  if (LowLatencyReach& reach = plan.reach; options.low_latency.bytes != 0) {
    const LowLatencyOptions& asked_for = options.low_latency;
    reach.node_width = width;
    reach.far = nodes.reached_by_rdma(asked_for.allow_nvlink);
    reach.rails_always = asked_for.rails == LowLatencyRails::always;
    reach.why_no_rails = asked_for.rails == LowLatencyRails::never ? "as asked for"
                         : !asked_for.allow_nvlink                 ? "as NVLink is not allowed"
                         : reach.far.empty()                       ? "as there is one node"
                         : asked_for.masking                       ? "as ranks may be masked"
                         : width < 2 ? "as nodes are not all of equally many consecutive ranks, two or more"
                                     : "";
    if (*reach.why_no_rails == '\0') reach.rail_width = width;
  }
  // Memory from which NICs fetch rows, and, with rails, rows for relays to forward.
  if (!plan.reach.far.empty()) layout.low_latency.add_staging(plan.reach.rail_width == 0 ? 0 : nodes.num_nodes);
  // Kernels of combine count 16-byte units of the heap in 32 bits.
  constexpr std::size_t kMaxWindowEnd = std::size_t{64} << 30;
  if (layout.low_latency.bytes != 0 && layout.window_at() > kMaxWindowEnd) {
    fail<InvalidArgument>(
        "low_latency.bytes must leave low-latency memory in the first {} of the heap, got {}, which end at {}: make it "
        "smaller",
        format_bytes(kMaxWindowEnd), format_bytes(options.low_latency.bytes), format_bytes(layout.window_at()));
  }
  return plan;
}

void BufferPlan::choose_lanes(const rdma::AgreedWire& wire) {
  InternodeOptions& internode = options.internode;
  const bool ethernet = wire.keeps_to_path();  // it sends each lane along one path
  if (internode.lanes == 0) internode.lanes = ethernet ? kMostInternodeLanes : 1;
  const int most = internode.num_qps_per_rank == 0 ? kMostInternodeLanes : internode.num_qps_per_rank;
  internode.lanes = std::min(internode.lanes, static_cast<int>(std::bit_floor(static_cast<unsigned>(most))));
  int& lanes = options.low_latency.lanes;
  if (options.low_latency.bytes == 0 || lanes != 0) return;
  // Of few flows some paths of an Ethernet get several and others none. All ranks have as many lanes as the one that
  // reaches the fewest by RDMA wants.
  constexpr int kWantedFlows = 32;
  lanes = 1;
  NodeMembership of = nodes;
  for (of.rank = 0; ethernet && of.rank < grid.num_ranks; ++of.rank) {
    const int far = static_cast<int>(of.reached_by_rdma(options.low_latency.allow_nvlink).size());
    while (far != 0 && lanes < kMostLowLatencyLanes && far * lanes < kWantedFlows) lanes *= 2;
  }
}

std::array<rdma::ConnectionOptions, 2> BufferPlan::connections() const {
  std::array<rdma::ConnectionOptions, 2> sets;
  rdma::ConnectionOptions& low_latency = sets[kLowLatency];
  low_latency.peers = reach.far;
  low_latency.channels = low_latency_channels(std::max(1, options.low_latency.lanes));
  // Dispatch and combine of two halves of a batch run at the same time, as lanes do.
  low_latency.kinds = static_cast<int>(kLowLatencyKinds);
  low_latency.long_messages = false;
  if (!reach.far.empty() && grid.others() != 0) low_latency.rail_width = grid.width;  // if a fabric connects rails only

  rdma::ConnectionOptions& normal = sets[kNormalMode];
  const int lanes = std::max(1, options.internode.lanes);
  for (int number = 0; number < grid.others(); ++number) normal.peers.push_back(grid.rail_in(grid.other(number)));
  normal.channels = lanes + 1;  // rows of each lane, credit
  // No fewer entries than a lane can have under way (the shape, and for each chunk a write and an addition). A poster
  // would wait for its NIC otherwise, and with it all that its warp serves.
  const int chunks = lanes == 1 ? ControlWindow::kMostChunks : RailPairs::kMostUnderWay;
  normal.depth = std::bit_ceil(1 + 2 * static_cast<std::uint32_t>(chunks));
  low_latency.sink = normal.sink = layout.sink_at();
  return sets;
}

}  // namespace deep_ep
