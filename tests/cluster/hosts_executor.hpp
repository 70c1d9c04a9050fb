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

/// A heap whose peers on other hosts are null for kernels. The wire 'local' needs to write to them.
class HeapOfOneHost final : public SymmetricHeap {
 public:
  HeapOfOneHost(std::unique_ptr<SymmetricHeap> inner, int rank, const HostOfRank& host)
      : inner_(std::move(inner)), for_kernels_(inner_->peers().begin(), inner_->peers().end()) {
    for (std::size_t peer = 0; peer < for_kernels_.size(); ++peer) {
      if (host(static_cast<int>(peer)) != host(rank)) for_kernels_[peer] = nullptr;
    }
  }

  std::byte* local() const override { return inner_->local(); }
  std::size_t bytes() const override { return inner_->bytes(); }
  HeapKind kind() const override { return inner_->kind(); }
  std::span<std::byte* const> peers() const override { return inner_->peers(); }
  std::byte* const* device_peers() const override { return for_kernels_.data(); }
  void unmap_peers() noexcept override { inner_->unmap_peers(); }
  void keep(Bootstrap& bootstrap) override { inner_->keep(bootstrap); }
  void release_memory() noexcept override { inner_->release_memory(); }
  void resume(Bootstrap& bootstrap) override { inner_->resume(bootstrap); }
  void admit(Bootstrap& bootstrap, const std::vector<bool>& is_new) override { inner_->admit(bootstrap, is_new); }

 private:
  std::unique_ptr<SymmetricHeap> inner_;
  std::vector<std::byte*> for_kernels_;
};

class HostsExecutor final : public CountingExecutor {
 public:
  HostsExecutor(const std::shared_ptr<Executor>& inner, int rank, HostOfRank host)
      : CountingExecutor(inner), rank_(rank), host_(std::move(host)) {}

  std::unique_ptr<SymmetricHeap> create_heap(Bootstrap& bootstrap, const HeapOptions& options) override {
    HeapOptions of_hosts = options;
    of_hosts.bytes_for = [&](std::span<const int> one_host) {
      std::vector<int> domains;
      for (int rank = 0; rank < static_cast<int>(one_host.size()); ++rank) {
        int lowest = 0;
        while (host_(lowest) != host_(rank)) ++lowest;
        domains.push_back(lowest);
      }
      return options.bytes_for(domains);
    };
    return std::make_unique<HeapOfOneHost>(CountingExecutor::create_heap(bootstrap, of_hosts), rank_, host_);
  }

 private:
  int rank_;
  HostOfRank host_;
};

}  // namespace deep_ep::test
