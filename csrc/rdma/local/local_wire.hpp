// The wire between ranks of one host: what a NIC would send is copied between heaps that this process has mapped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <unordered_map>

#include "csrc/executor/own_stream.hpp"
#include "csrc/rdma/ring/wire.hpp"

namespace deep_ep::rdma {

/// Checks what a device checks: keys, bounds, alignment of additions. Operations are executed in post(), in its order.
/// Memory is made known before the handler starts to use it; queue pairs need not be.
class LocalWire final : public Wire {
 public:
  /// Without an executor heaps are ordinary memory of this process, and additions are atomic among all processes. Else
  /// copies of the executor reach them, and host memory that it pinned, on a stream of its own: an addition reads the
  /// word, adds on the host and writes it back, so only one wire may add to a word (every signal of this library has
  /// one producer).
  explicit LocalWire(std::shared_ptr<Executor> executor = nullptr);

  /// Makes `bytes` from `base` known under a key, with addresses that start at 0. Every heap that operations read or
  /// write needs one, this rank's and the peers'; ranks agree on the keys.
  void add_memory(std::uint32_t key, void* base, std::size_t bytes);

  std::size_t post(std::size_t ring, std::span<const Operation> operations) override;
  std::size_t poll(std::span<WireCompletion> completions) override;

 private:
  struct Region {
    std::byte* base;
    std::size_t bytes;
  };

  Syndrome execute(const Operation& operation);
  void copy(void* destination, const void* source, std::size_t bytes);
  /// Adds to a word, with release of everything copied before; the old value goes to `before`.
  void fetch_add(void* word, std::uint64_t add, void* before);
  std::byte* find(const device::rdma::KeyedAddress& place, std::uint64_t bytes) const;

  std::shared_ptr<Executor> executor_;
  std::optional<OwnStream> stream_;
  std::shared_ptr<std::uint64_t> bounce_;  ///< pinned: the value that was read, and the one to write
  bool copying_ = false;                   ///< on the stream
  std::unordered_map<std::uint32_t, Region> regions_;
  std::unordered_map<std::size_t, bool> failed_;  ///< by ring
  std::deque<WireCompletion> completions_;
};

}  // namespace deep_ep::rdma
