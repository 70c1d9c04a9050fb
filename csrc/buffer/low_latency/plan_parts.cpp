#include "csrc/buffer/low_latency/plan_parts.hpp"

#include "csrc/buffer/low_latency/rails.hpp"
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
      "a low-latency call to {} ranks by RDMA needs {} blocks side by side, but this process has {} multiprocessors of "
      "the "
      "GPU: raise CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, or config.warps_per_block",
      setup.common.num_far, others + 1, room);
}

int choose_rails(bool may, int max_tokens, int num_topk, std::size_t row_bytes, std::size_t rail_row_bytes,
                 const LowLatencySetup& setup) {
  const std::size_t needed = static_cast<std::size_t>(max_tokens) * rail_row_bytes;
  if (setup.rail_width == 0 || !may || needed > setup.common.window.source_bytes) return 0;
  const RailTraffic traffic{.ranks = setup.common.num_ranks,
                            .ranks_per_node = setup.rail_width,
                            .topk = num_topk,
                            .max_tokens = max_tokens,
                            .row_bytes = row_bytes,
                            .rail_row_bytes = rail_row_bytes};
  return setup.rails_always || rails_pay(traffic) ? setup.rail_width : 0;
}

}  // namespace deep_ep
