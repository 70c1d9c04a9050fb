// What buffers take, before anything is allocated. All numbers come from where the library has its own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "csrc/buffer/buffer_plan.hpp"
#include "deep_ep/buffer.hpp"

namespace deep_ep::tools {

/// A run, as far as the sizes of its buffers depend on it.
struct BufferSizes {
  int ranks = 8;
  int ranks_per_node = 8;
  std::int64_t tokens = 4096;
  int low_latency_tokens = 128;
  std::int64_t hidden = 7168;
  int topk = 8;
  int experts = 256;
  std::string dtype = "bf16";

  int nodes() const { return ranks / ranks_per_node; }
};

/// A buffer that a program may make.
struct SizedBuffer {
  std::string mode;
  BufferOptions options;
  BufferPlan plan;

  /// Bytes that NICs read and write: the heap, where there is a NIC to use.
  std::size_t registered_bytes() const { return plan.queue_pairs() == 0 ? 0 : plan.layout.bytes(); }
  /// Of the rings of queue pairs, as the handler `gpu` has them; others take less.
  std::size_t ring_bytes() const;
  std::size_t received_bytes() const { return plan.layout.bytes() - plan.layout.arena_at(); }
  std::size_t signal_bytes() const { return plan.layout.control.bytes() + plan.layout.internode.bytes; }
};

/// One for each mode, the last one for all modes together (but where there are no low-latency calls). Ranks must be a
/// multiple of those of a node, and experts of ranks.
std::vector<SizedBuffer> size_buffers(const BufferSizes& run);

}  // namespace deep_ep::tools
