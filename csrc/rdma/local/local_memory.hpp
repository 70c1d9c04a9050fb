// How the `local` wire touches heaps: memory of the host directly, memory of GPUs through an executor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace deep_ep {
class Executor;
}

namespace deep_ep::rdma {

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

}  // namespace deep_ep::rdma
