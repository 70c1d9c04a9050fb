// A CPU executor with which ranks of one machine are on several hosts, of any number of ranks each: kernels cannot
// reach the heaps of other hosts, which have no address there, just as in a real cluster. (With ranks_per_node all
// nodes are equal, and the heaps of other nodes are mapped.)
#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "tests/cluster/counting_executor.hpp"

namespace deep_ep::test {

/// The host of each rank.
using HostOfRank = std::function<int(int rank)>;

class HostsExecutor final : public CountingExecutor {
 public:
  HostsExecutor(const std::shared_ptr<Executor>& inner, int rank, HostOfRank host)
      : CountingExecutor(inner), rank_(rank), host_(std::move(host)) {}

  std::unique_ptr<SymmetricHeap> create_heap(Bootstrap& bootstrap, const HeapBytes& bytes_for) override {
    const auto of_hosts = [&](std::span<const int> one_host) {
      std::vector<int> domains;
      for (int rank = 0; rank < static_cast<int>(one_host.size()); ++rank) {
        int lowest = 0;
        while (host_(lowest) != host_(rank)) ++lowest;
        domains.push_back(lowest);
      }
      return bytes_for(domains);
    };
    auto heap = CountingExecutor::create_heap(bootstrap, of_hosts);
    // Null for kernels alone: the wire 'local' needs to write there. The CPU executor's device memory is ordinary
    // memory.
    auto* const for_kernels = const_cast<std::byte**>(heap->device_peers());
    for (int peer = 0; peer < bootstrap.size(); ++peer) {
      if (host_(peer) != host_(rank_)) for_kernels[peer] = nullptr;
    }
    return heap;
  }

 private:
  int rank_;
  HostOfRank host_;
};

}  // namespace deep_ep::test
