#include "csrc/memory/heap_choice.hpp"

#include <algorithm>
#include <array>
#include <string>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {
namespace {

constexpr std::array<std::string_view, 4> kNames = {"auto", "posix_fd", "fabric", "cuda_ipc"};

/// Why this kind cannot serve the group; empty when it can. Only ranks of one host need to fit together, but for
/// fabric.
std::string obstacle(HeapKind kind, std::span<const HeapCapabilities> ranks) {
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const HeapCapabilities& here = ranks[rank];
    if (kind == HeapKind::posix_fd) {
      for (std::size_t other = 0; other < rank; ++other) {
        const ProcessIdentity& there = ranks[other].process;
        if (here.process.same_host(there) && !here.process.same_network(there)) {
          return fmt::format("rank {} and rank {} (host {}) are not in one network namespace", rank, other,
                             there.host.data());
        }
      }
      if (!here.posix_fd) {
        return fmt::format("GPU {} of rank {} cannot share memory by file descriptors", here.device, rank);
      }
    } else if (kind == HeapKind::fabric && !here.fabric) {
      return fmt::format("GPU {} of rank {} has no fabric handles (multi-node NVLink and its IMEX service are needed)",
                         here.device, rank);
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
  const bool one_host = std::all_of(ranks.begin(), ranks.end(), [&](const HeapCapabilities& rank) {
    return rank.process.same_host(ranks[0].process);
  });
  const auto possible = [&](HeapKind kind) { return obstacle(kind, ranks).empty(); };
  if (!one_host && possible(HeapKind::fabric)) return HeapKind::fabric;
  if (possible(HeapKind::posix_fd)) return HeapKind::posix_fd;
  if (possible(HeapKind::fabric)) return HeapKind::fabric;
  return HeapKind::cuda_ipc;
}

}  // namespace

bool shares_memory(HeapKind kind, const HeapCapabilities& a, const HeapCapabilities& b) {
  return kind == HeapKind::fabric || a.process.same_host(b.process);
}

std::vector<int> memory_domains(HeapKind kind, std::span<const HeapCapabilities> ranks) {
  std::vector<int> domains;
  for (const HeapCapabilities& rank : ranks) {
    const auto lowest =
        std::ranges::find_if(ranks, [&](const auto& other) { return shares_memory(kind, rank, other); });
    domains.push_back(static_cast<int>(lowest - ranks.begin()));
  }
  return domains;
}

HeapPlan plan_heap(std::span<const HeapCapabilities> ranks,
                   const std::function<std::size_t(std::span<const int> domains)>& bytes_for) {
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
  const std::uint64_t bytes = bytes_for ? bytes_for(memory_domains(plan.kind, ranks)) : ranks[0].bytes;
  plan.bytes = (std::max<std::uint64_t>(bytes, 1) + granularity - 1) / granularity * granularity;
  return plan;
}

std::string_view name_of(HeapKind kind) { return kNames[static_cast<std::size_t>(kind)]; }

HeapKind heap_kind_from_name(std::string_view name) {
  const auto found = std::find(kNames.begin(), kNames.end(), name);
  if (found == kNames.end()) fail<InvalidArgument>("heap kind '{}', allowed: auto, posix_fd, fabric, cuda_ipc", name);
  return static_cast<HeapKind>(found - kNames.begin());
}

}  // namespace deep_ep
