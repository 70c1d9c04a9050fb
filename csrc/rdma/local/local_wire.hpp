// The wire between ranks of one host: what a NIC would send is copied between heaps that this process has mapped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>

#include "csrc/rdma/ring/wire.hpp"

namespace deep_ep {
class Executor;
}

namespace deep_ep::rdma {

/// How the wire touches heaps: memory of the host directly, memory of GPUs through an executor.
/// Used by one thread. Operations take effect in the order of the calls.
class LocalMemory {
 public:
  virtual ~LocalMemory() = default;
  /// May go on reading and writing after it returns, until finish().
  virtual void copy(void* destination, const void* source, std::size_t bytes) = 0;
  /// Adds to a word, with release of everything copied before; the old value goes to `before`.
  virtual void fetch_add(void* word, std::uint64_t add, void* before) = 0;
  /// Waits until all operations so far are complete.
  virtual void finish() = 0;
};

/// Heaps that this process addresses as ordinary memory. Additions are atomic among all processes.
std::unique_ptr<LocalMemory> make_host_memory();

/// Heaps that only copies of `executor` reach, on a stream of its own; host memory that the executor pinned works, too.
/// An addition reads the word, adds on the host and writes it back, so only one wire may add to a word (every signal of
/// this library has one producer).
std::unique_ptr<LocalMemory> make_executor_memory(std::shared_ptr<Executor> executor);

/// Checks what a device checks: keys, bounds, alignment of additions. Operations are executed in post(), in its order.
/// Memory and queue pairs are made known before the handler starts to use them.
class LocalWire final : public Wire {
 public:
  explicit LocalWire(std::unique_ptr<LocalMemory> memory);

  /// Makes `bytes` from `base` known under a key, with addresses that start at 0. Every heap that operations read or
  /// write needs one, this rank's and the peers'; ranks agree on the keys (local_key_of_rank()).
  void add_memory(std::uint32_t key, void* base, std::size_t bytes);
  void add_queue_pair(std::uint32_t number);

  std::string_view name() const override { return "local"; }
  std::size_t post(std::span<const Operation> operations) override;
  std::size_t poll(std::span<WireCompletion> completions) override;

 private:
  struct Region {
    std::byte* base;
    std::size_t bytes;
  };

  Syndrome execute(const Operation& operation);
  std::byte* find(const device::rdma::KeyedAddress& place, std::uint64_t bytes) const;

  std::unique_ptr<LocalMemory> memory_;
  std::unordered_map<std::uint32_t, Region> regions_;
  std::unordered_map<std::uint32_t, bool> failed_;  ///< by queue pair
  std::deque<WireCompletion> completions_;
};

/// The key by which ranks on one host know rank r's heap; never 0, which is no key.
constexpr std::uint32_t local_key_of_rank(int rank) { return 0x10000u + static_cast<std::uint32_t>(rank); }

}  // namespace deep_ep::rdma
