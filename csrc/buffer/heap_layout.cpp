#include "csrc/buffer/heap_layout.hpp"

#include <algorithm>

#include "csrc/buffer/defaults.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

constexpr int kMostWindowTokens = 8192;

ControlWindow control_window(int num_ranks, const BufferOptions& options, std::size_t window_bytes) {
  constexpr std::size_t kSmallestRow = 128;
  const std::size_t rows = window_bytes / (kSmallestRow * static_cast<std::size_t>(num_ranks));
  return {num_ranks, options.max_local_experts, static_cast<int>(std::clamp<std::size_t>(rows, 2, kMostWindowTokens))};
}

}  // namespace

std::size_t HeapLayout::most_signal_bytes(int num_ranks, int max_local_experts) {
  return ControlWindow(num_ranks, max_local_experts, kMostWindowTokens).bytes();
}

HeapLayout HeapLayout::make(const BufferOptions& options, int num_ranks) {
  HeapLayout layout;
  const std::size_t window =
      options.window_bytes != 0 ? options.window_bytes : defaults::window_bytes(options.heap_bytes);
  layout.control = control_window(num_ranks, options, window);
  if (options.heap_bytes < window || options.heap_bytes - window < layout.control.bytes()) {
    fail<OutOfMemory>("heap_bytes is {}, but the signals of {} ranks take {} and the window {}: at least {} are needed",
                      options.heap_bytes, num_ranks, format_bytes(layout.control.bytes()), format_bytes(window),
                      layout.control.bytes() + window);
  }
  layout.window_bytes = window / kLine * kLine;
  layout.low_latency =
      LowLatencyWindow::make(layout.control.bytes(), options.low_latency.bytes, num_ranks, options.max_local_experts);
  if (options.low_latency.bytes != 0 && (layout.low_latency.slots == 0 || layout.low_latency.source_bytes == 0)) {
    fail<InvalidArgument>(
        "low_latency.bytes is {}, which does not even hold the signals of {} ranks with {} local experts: see "
        "Buffer::low_latency_bytes_hint",
        options.low_latency.bytes, num_ranks, options.max_local_experts);
  }
  layout.asked_bytes = options.heap_bytes + layout.low_latency.bytes;
  return layout;
}

void HeapLayout::add_staging(int rail_nodes) {
  staging = LowLatencyStaging::make(staging_at(), low_latency, rail_nodes);
}

void HeapLayout::add_internode(const NodeGrid& grid, int max_local_experts) {
  internode = InternodeWindow::make(internode_at(), grid, max_local_experts);
}

}  // namespace deep_ep
