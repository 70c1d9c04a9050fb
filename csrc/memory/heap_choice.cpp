#include "csrc/memory/heap_choice.hpp"

#include <algorithm>
#include <string>

#include "csrc/support/format.hpp"

namespace deep_ep {
namespace {

/// Why ranks of a host cannot share memory by file descriptors; empty when they can.
std::string obstacle(std::span<const HeapCapabilities> ranks) {
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const HeapCapabilities& here = ranks[rank];
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
  }
  return {};
}

}  // namespace

HeapKind choose_heap(std::span<const HeapCapabilities> ranks) {
  const bool one_host = std::ranges::all_of(
      ranks, [&](const HeapCapabilities& rank) { return rank.process.same_host(ranks[0].process); });
  const bool fabric = std::ranges::all_of(ranks, &HeapCapabilities::fabric);
  const std::string why = obstacle(ranks);
  if (fabric && (!one_host || !why.empty())) return HeapKind::fabric;
  if (why.empty()) return HeapKind::posix_fd;
  fail<SystemError>("ranks of a host cannot share their heaps: {}", why);
}

bool shares_memory(HeapKind kind, const HeapCapabilities& a, const HeapCapabilities& b) {
  return kind == HeapKind::fabric || a.process.same_host(b.process);
}

std::size_t heap_bytes(HeapKind kind, std::span<const HeapCapabilities> ranks, const HeapBytes& bytes_for) {
  std::vector<int> domains;
  for (const HeapCapabilities& rank : ranks) {
    const auto shares = [&](const HeapCapabilities& other) { return shares_memory(kind, rank, other); };
    domains.push_back(static_cast<int>(std::ranges::find_if(ranks, shares) - ranks.begin()));
  }
  // Granularities are powers of two, so the largest is a multiple of each.
  const std::uint64_t granularity = std::ranges::max(ranks, {}, &HeapCapabilities::granularity).granularity;
  return (std::max<std::uint64_t>(bytes_for(domains), 1) + granularity - 1) / granularity * granularity;
}

const char* name_of(HeapKind kind) { return kind == HeapKind::posix_fd ? "posix_fd" : "fabric"; }

}  // namespace deep_ep
