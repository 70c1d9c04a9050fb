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

/// A heap whose peers on other hosts are null for kernels, and for the Buffer if `mapped` is false.
class HeapOfOneHost final : public SymmetricHeap {
 public:
  HeapOfOneHost(std::unique_ptr<SymmetricHeap> inner, int rank, const HostOfRank& host, bool mapped)
      : inner_(std::move(inner)), for_kernels_(inner_->peers().begin(), inner_->peers().end()) {
    for (std::size_t peer = 0; peer < for_kernels_.size(); ++peer) {
      if (host(static_cast<int>(peer)) != host(rank)) for_kernels_[peer] = nullptr;
    }
    peers_ = mapped ? std::vector(inner_->peers().begin(), inner_->peers().end()) : for_kernels_;
  }

  std::byte* local() const override { return inner_->local(); }
  std::size_t bytes() const override { return inner_->bytes(); }
  HeapKind kind() const override { return inner_->kind(); }
  std::span<std::byte* const> peers() const override { return peers_; }
  std::byte* const* device_peers() const override { return for_kernels_.data(); }
  void unmap_peers() noexcept override { inner_->unmap_peers(); }

 private:
  std::unique_ptr<SymmetricHeap> inner_;
  std::vector<std::byte*> for_kernels_, peers_;
};

class HostsExecutor final : public CountingExecutor {
 public:
  HostsExecutor(const std::shared_ptr<Executor>& inner, int rank, HostOfRank host)
      : CountingExecutor(inner), rank_(rank), host_(std::move(host)) {}

  /// A Buffer looks at its first heap to find out who is where, and makes a larger one when it knows that there are
  /// several nodes. The wire 'local' needs to write to what is mapped of that.
  std::unique_ptr<SymmetricHeap> create_heap(Bootstrap& bootstrap, const HeapOptions& options) override {
    return std::make_unique<HeapOfOneHost>(CountingExecutor::create_heap(bootstrap, options), rank_, host_,
                                           heaps_++ > 0);
  }

 private:
  int rank_;
  HostOfRank host_;
  int heaps_ = 0;
};

}  // namespace deep_ep::test
