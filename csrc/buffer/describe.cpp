// Buffer::describe.
#include <algorithm>
#include <vector>

#include "csrc/buffer/implementation.hpp"
#include "csrc/memory/heap_choice.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep {
namespace {

std::string describe_nodes(const Runtime& runtime) {
  const NodeMembership& nodes = runtime.nodes();
  std::vector<int> ranks;
  for (int rank = 0; rank < runtime.num_ranks(); ++rank) {
    if (nodes.same_node(rank)) ranks.push_back(rank);
  }
  return fmt::format("node {} of {}: {}", nodes.node[static_cast<std::size_t>(runtime.rank())], nodes.num_nodes,
                     format_ranks(ranks));
}

std::string describe_heap(const Runtime& runtime) {
  const HeapLayout& layout = runtime.layout();
  const SymmetricHeap& heap = *runtime.heap();
  std::string text = fmt::format("heap of {}", format_bytes(heap.bytes()));
  if (runtime.device().kind == Device::Kind::cuda) text += fmt::format(", shared by {}", name_of(heap.kind()));
  text += fmt::format(": signals {}", format_bytes(layout.control.bytes()));
  if (layout.low_latency.bytes != 0) text += fmt::format(", low latency {}", format_bytes(layout.low_latency.bytes));
  if (layout.staging.bytes != 0) text += fmt::format(", for NICs to read {}", format_bytes(layout.staging.bytes));
  return text + fmt::format(", window {}, received tensors {}", format_bytes(layout.window_bytes),
                            format_bytes(heap.bytes() - layout.arena_at()));
}

std::string describe_normal_mode(const Runtime& runtime) {
  const LaunchPolicy& policy = runtime.policy();
  const auto sms = [&](const Config& config) { return std::min(config.num_sms, policy.multiprocessors); };
  return fmt::format("normal mode: dispatch on {} SMs, combine on {}, of {}, where a call does not say",
                     sms(Config::dispatch_default(runtime.num_ranks())),
                     sms(Config::combine_default(runtime.num_ranks())), policy.multiprocessors);
}

}  // namespace

std::string LowLatency::describe() const {
  const LowLatencyWindow& window = runtime_.layout().low_latency;
  std::string text = fmt::format("low latency: room for {} tokens and {} of rows from each rank, late ranks are {}, ",
                                 window.slots, format_bytes(window.source_bytes), masks_ ? "masked" : "errors");
  if (links_) return text + links_->describe();
  return text + fmt::format("NVLink reaches every rank, {}", runtime_.low_latency_reach().describe_rails());
}

std::string Buffer::Implementation::describe_normal_mode() const {
  if (runtime_.nodes().num_nodes == 1) {
    const int lanes = runtime_.options().internode.lanes;
    const std::string text = deep_ep::describe_normal_mode(runtime_);
    return lanes == 1 ? text : text + fmt::format(", without the {} lanes, as there is one node", lanes);
  }
  if (!internode_) return "normal mode: not between nodes that are not all of equally many consecutive ranks";
  return fmt::format("{}, between nodes (combine pulls, or pulls a copy) by {}",
                     deep_ep::describe_normal_mode(runtime_), internode_->describe());
}

std::string Buffer::Implementation::describe() const {
  const double timeout_s = runtime_.timeout_s();
  return fmt::format("rank {} of {} on {}, {}\n{}\n{}\n{}\ntime-out: {}\n", runtime_.rank(), runtime_.num_ranks(),
                     to_string(runtime_.device()), describe_nodes(runtime_), describe_heap(runtime_),
                     describe_normal_mode(), low_latency_ ? low_latency_->describe() : "low latency: no memory",
                     timeout_s == 0 ? "none" : fmt::format("{} s", timeout_s));
}

}  // namespace deep_ep
