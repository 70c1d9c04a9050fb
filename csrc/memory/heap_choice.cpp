#include "csrc/memory/heap_choice.hpp"

#include <algorithm>
#include <array>
#include <string>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

constexpr std::array<std::string_view, 4> kNames = {"auto", "posix_fd", "fabric", "cuda_ipc"};

/// Why this kind cannot serve the group; empty when it can.
std::string obstacle(HeapKind kind, std::span<const HeapCapabilities> ranks) {
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const HeapCapabilities& here = ranks[rank];
    const ProcessIdentity& first = ranks[0].process;
    const auto elsewhere = [&](std::string_view what) {
      return fmt::format("rank {} (host {}) and rank 0 (host {}) are not {}", rank, here.process.host.data(),
                         first.host.data(), what);
    };
    if (kind == HeapKind::posix_fd) {
      if (!here.process.same_host(first)) return elsewhere("on one host");
      if (!here.process.same_network(first)) return elsewhere("in one network namespace");
      if (!here.posix_fd) {
        return fmt::format("GPU {} of rank {} cannot share memory by file descriptors", here.device, rank);
      }
    } else if (kind == HeapKind::fabric) {
      if (!here.fabric) {
        return fmt::format(
            "GPU {} of rank {} has no fabric handles (multi-node NVLink and its IMEX service are needed)", here.device,
            rank);
      }
    } else if (!here.process.same_host(first)) {
      return elsewhere("on one host");
    }
  }
  return {};
}

HeapKind choose(std::span<const HeapCapabilities> ranks) {
  const HeapKind requested = ranks[0].requested;
  if (requested != HeapKind::automatic) {
    const std::string why = obstacle(requested, ranks);
    if (!why.empty()) fail<SystemError>("heap of kind {} was asked for: {}", name_of(requested), why);
    return requested;
  }
  std::string reasons;
  for (const HeapKind kind : {HeapKind::posix_fd, HeapKind::fabric, HeapKind::cuda_ipc}) {
    const std::string why = obstacle(kind, ranks);
    if (why.empty()) return kind;
    reasons += fmt::format("{}{}: {}", reasons.empty() ? "" : "; ", name_of(kind), why);
  }
  fail<SystemError>("no kind of heap works for these ranks. {}", reasons);
}

}  // namespace

HeapPlan plan_heap(std::span<const HeapCapabilities> ranks) {
  std::uint64_t granularity = 1;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].bytes != ranks[0].bytes) {
      fail<RankMismatch>("heap size: rank 0 asks for {} bytes, rank {} for {}; all ranks must ask for the same",
                         ranks[0].bytes, rank, ranks[rank].bytes);
    }
    if (ranks[rank].requested != ranks[0].requested) {
      fail<RankMismatch>("heap kind: rank 0 asks for {}, rank {} for {}; all ranks must ask for the same",
                         name_of(ranks[0].requested), rank, name_of(ranks[rank].requested));
    }
    granularity = std::max(granularity, ranks[rank].granularity);
  }
  HeapPlan plan;
  plan.kind = choose(ranks);
  // Granularities are powers of two, so the largest is a multiple of each.
  plan.bytes = (std::max<std::uint64_t>(ranks[0].bytes, 1) + granularity - 1) / granularity * granularity;
  return plan;
}

std::string_view name_of(HeapKind kind) { return kNames[static_cast<std::size_t>(kind)]; }

HeapKind heap_kind_from_name(std::string_view name) {
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  if (found == kNames.end()) fail<InvalidArgument>("heap kind '{}', allowed: auto, posix_fd, fabric, cuda_ipc", name);
  return static_cast<HeapKind>(found - kNames.begin());
}

}  // namespace deep_ep
