#include "csrc/buffer/low_latency/plan.hpp"

#include <cmath>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {

void check_room(std::int64_t max_tokens, std::int64_t hidden, std::size_t row_bytes, const LowLatencySetup& setup) {
  const LowLatencyWindow& window = setup.common.window;
  const std::size_t needed = static_cast<std::size_t>(max_tokens) * row_bytes;
  if (max_tokens <= window.slots && needed <= window.source_bytes) return;
  fail<InvalidArgument>(
      "max_tokens {} and hidden {} do not fit low_latency.bytes {}: there is room for {} tokens and {} of rows from "
      "each rank, this call has rows of {}, {} in all; Buffer::low_latency_bytes_hint says what is needed",
      max_tokens, hidden, setup.low_latency_bytes, window.slots, format_bytes(window.source_bytes),
      format_bytes(row_bytes), format_bytes(needed));
}

void check_resident(int others, const LowLatencySetup& setup) {
  const int room = setup.policy.multiprocessors;
  if (!setup.on_gpu() || others < room) return;
  fail<InvalidArgument>(
      "a low-latency call that reaches {} ranks by RDMA needs {} blocks side by side, but this process has {} "
      "multiprocessors of the GPU: raise CUDA_MPS_ACTIVE_THREAD_PERCENTAGE",
      setup.common.num_far, others + 1, room);
}

int choose_rails(bool may, int max_tokens, int num_topk, std::size_t row_bytes, std::size_t rail_row_bytes,
                 const LowLatencySetup& setup) {
  const std::size_t needed = static_cast<std::size_t>(max_tokens) * rail_row_bytes;
  if (setup.rail_width == 0 || !may || needed > setup.common.window.source_bytes) return 0;
  if (setup.rails_always) return setup.rail_width;
  // Do rails save more time of the NIC than the additional hop takes? Directly a rank sends to other nodes a row for
  // each rank that is selected, by rails one for each node, if every expert is equally likely to be selected.
  constexpr double kHopNs = 5000;  // what a call within a node takes beyond its bytes
  const int ranks = setup.common.num_ranks;
  const int nodes = ranks / setup.rail_width;
  // The rows of a token, where it has one for each of `others` of so many equal parts, of which some of its selections
  // fall to at least one.
  const auto bytes = [&](int others, int parts, std::size_t bytes_of_row) {
    const double selected = 1 - std::pow(1 - 1.0 / parts, num_topk);
    return max_tokens * others * selected * static_cast<double>(bytes_of_row);
  };
  const double saved = bytes(ranks - setup.rail_width, ranks, row_bytes) - bytes(nodes - 1, nodes, rail_row_bytes);
  return saved > kHopNs * setup.nic_bytes_per_ns ? setup.rail_width : 0;
}

}  // namespace deep_ep
