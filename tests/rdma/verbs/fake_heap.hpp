// A heap of ordinary memory, of one of two ranks.
#pragma once

#include <cstddef>
#include <span>

#include "csrc/memory/symmetric_heap.hpp"

namespace deep_ep::rdma::verbs::test {

class FakeHeap final : public SymmetricHeap {
 public:
  static constexpr std::size_t kBytes = std::size_t{1} << 20;

  std::byte* local() const override { return memory_; }
  std::size_t bytes() const override { return kBytes; }
  HeapKind kind() const override { return HeapKind::posix_fd; }
  std::span<std::byte* const> peers() const override { return peers_; }
  std::byte* const* device_peers() const override { return peers_; }
  void unmap_peers() noexcept override {}
  void keep(Bootstrap& /*bootstrap*/) override {}
  void release_memory() noexcept override {}
  void resume(Bootstrap& /*bootstrap*/) override {}
  void admit(Bootstrap& /*bootstrap*/, const std::vector<bool>& /*is_new*/) override {}

 private:
  alignas(4096) mutable std::byte memory_[kBytes]{};
  std::byte* peers_[2] = {memory_, nullptr};  // the other rank is far away
};

}  // namespace deep_ep::rdma::verbs::test
