#include "tools/common/buffer_sizes.hpp"

#include <algorithm>

#include "csrc/buffer/internode/lanes.hpp"
#include "csrc/buffer/low_latency/lanes.hpp"
#include "csrc/rdma/ring/ring_memory.hpp"
#include "csrc/rdma/verbs/devx/devx_device.hpp"

namespace deep_ep::tools {
namespace {

SizedBuffer sized(const std::string& mode, const BufferOptions& options, int ranks, int ranks_per_node) {
  return {mode, options, BufferPlan::make(options, NodeMembership::of_consecutive(0, ranks, ranks_per_node))};
}

}  // namespace

std::size_t SizedBuffer::ring_bytes() const {
  std::size_t bytes = 0;
  for (const rdma::ConnectionOptions& options : plan.connections()) {
    bytes += options.peers.size() * static_cast<std::size_t>(options.channels) *
             rdma::RingLayout::of(options.depth, rdma::verbs::devx::kRingAlignment).bytes;
  }
  return bytes;
}

std::vector<SizedBuffer> size_buffers(const BufferSizes& size) {
  const bool wide = size.dtype == "bf16";
  BufferOptions none;
  none.max_local_experts = std::max(none.max_local_experts, size.experts / size.ranks);
  none.low_latency.rails = asked_for_rails(none.low_latency.rails);
  none.internode.lanes = asked_for_internode_lanes(none.internode);
  none.low_latency.lanes = asked_for_lanes(none.low_latency.lanes);
  const auto normal_mode = [&](int ranks) {
    BufferOptions options = none;
    options.heap_bytes =
        Buffer::heap_bytes_hint(ranks, size.tokens, wide ? 2 * size.hidden : size.hidden, size.topk, wide ? 0 : -1);
    return options;
  };
  const auto with_low_latency = [&](BufferOptions options) {
    options.low_latency.bytes =
        Buffer::low_latency_bytes_hint(size.low_latency_tokens, size.hidden, size.ranks, size.experts);
    return options;
  };

  std::vector<SizedBuffer> buffers;
  buffers.push_back(sized("intranode", normal_mode(size.ranks_per_node), size.ranks_per_node, size.ranks_per_node));
  if (size.nodes() > 1) buffers.push_back(sized("internode", normal_mode(size.ranks), size.ranks, size.ranks_per_node));
  if (size.low_latency_tokens == 0) return buffers;
  // Its calls need nothing of the heap beside their own part.
  BufferOptions smallest = none;
  smallest.heap_bytes = Buffer::heap_bytes_for(size.ranks, 0);
  buffers.push_back(sized("low_latency", with_low_latency(smallest), size.ranks, size.ranks_per_node));
  buffers.push_back(sized("all", with_low_latency(normal_mode(size.ranks)), size.ranks, size.ranks_per_node));
  return buffers;
}

}  // namespace deep_ep::tools
