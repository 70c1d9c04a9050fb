#include "tools/doctor/needs.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/common/limits.hpp"
#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {
namespace {

BufferSizes fitting(BufferSizes run) {
  run.ranks = std::clamp(run.ranks, 1, kMaxRanks);
  run.ranks_per_node = std::clamp(run.ranks_per_node, 1, run.ranks);
  while (run.ranks % run.ranks_per_node != 0) --run.ranks_per_node;
  run.experts = (run.experts + run.ranks - 1) / run.ranks * run.ranks;
  return run;
}

}  // namespace

Needs needs_of(const Patient& patient) {
  Needs needs;
  needs.run = fitting(patient.run);
  const SizedBuffer buffer = size_buffers(needs.run).back();
  const auto ranks = static_cast<std::uint64_t>(needs.run.ranks);
  const auto ranks_per_node = static_cast<std::uint64_t>(needs.run.ranks_per_node);
  const bool on_cpu = patient.gpus.empty();
  needs.buffer_bytes = buffer.plan.layout.bytes() + buffer.ring_bytes();
  needs.queue_pairs = buffer.plan.queue_pairs();
  // Heaps on GPUs are registered by dma-buf, which pins nothing of the host's.
  if (!patient.nics.empty()) needs.locked_bytes = buffer.ring_bytes() + (on_cpu ? buffer.registered_bytes() : 0);
  if (on_cpu) needs.shared_bytes = ranks_per_node * buffer.plan.layout.bytes();
  needs.host_bytes = needs.shared_bytes + ranks_per_node * buffer.ring_bytes();
  // A program with CUDA and Python has some 250 files open by itself. Rank 0 hears all others; each rank meets those of
  // its node by a socket, and gets and holds their memory by descriptors.
  needs.open_files = 256 + ranks + 4 * ranks_per_node;
  // A thread for the program, one for the NICs, and the some thirty of CUDA and Python.
  needs.threads = 32 * ranks_per_node;
  // Each pair has a completion queue; the rest is a handful of registrations, domains and doorbell pages.
  needs.rdma_objects = needs.queue_pairs == 0 ? 0 : 2 * needs.queue_pairs + 16;
  return needs;
}

std::string Needs::text() const {
  return fmt::format("{} ranks, {} a node, {} tokens of {} channels", run.ranks, run.ranks_per_node, run.tokens,
                     run.hidden);
}

}  // namespace deep_ep::tools
