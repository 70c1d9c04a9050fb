// What stands behind the tensors that the library returns: memory of the arena, or of the executor's stream-ordered
// pool.
//
// Both keep everything alive that their memory needs, so a tensor may outlive the Buffer. Both give the memory back
// without waiting, behind the work of all streams that were recorded; those streams must still exist then (as for any
// GPU tensor). Memory that was used by a stream while it recorded a CUDA graph is not reused, see Arena.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "csrc/memory/arena.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// The streams that use a piece of memory. Tensors are copied between threads, so it locks.
class StreamUses {
 public:
  StreamUses(Executor& executor, StreamHandle first) { add(executor, first); }

  void add(Executor& executor, StreamHandle stream);
  /// An event on each stream except `skip`, when a skip is given. Nothing is left to wait for in the ones skipped.
  std::vector<EventHandle> record(Executor& executor, const StreamHandle* skip = nullptr);
  /// True when a stream recorded a graph when it was added, or does now.
  bool in_graph(Executor& executor);

 private:
  std::mutex mutex_;
  std::vector<StreamHandle> streams_;
  bool in_graph_ = false;
};

class ArenaStorage final : public Tensor::Storage {
 public:
  /// Owns `block`, which is used first on `stream`. The caller has made the stream wait for Allocation::wait_for.
  ArenaStorage(std::shared_ptr<Arena> arena, const Arena::Block& block, StreamHandle stream);
  ~ArenaStorage() override;
  ArenaStorage(const ArenaStorage&) = delete;
  ArenaStorage& operator=(const ArenaStorage&) = delete;

  void record_stream(StreamHandle stream) override;
  const Arena::Block& block() const { return block_; }
  std::byte* data() const { return arena_->address(block_); }

  /// Allocates from the arena in the order of `stream`, waits included. nullptr when the arena has no room.
  static std::shared_ptr<ArenaStorage> allocate(const std::shared_ptr<Arena>& arena, std::size_t bytes,
                                                StreamHandle stream);

 private:
  std::shared_ptr<Arena> arena_;
  Arena::Block block_;
  StreamUses uses_;
};

class PoolStorage final : public Tensor::Storage {
 public:
  /// Executor::allocate_async on `stream`.
  PoolStorage(std::shared_ptr<Executor> executor, std::size_t bytes, StreamHandle stream);
  ~PoolStorage() override;
  PoolStorage(const PoolStorage&) = delete;
  PoolStorage& operator=(const PoolStorage&) = delete;

  void record_stream(StreamHandle stream) override;
  std::byte* data() const { return static_cast<std::byte*>(memory_); }

 private:
  std::shared_ptr<Executor> executor_;
  StreamHandle stream_;
  void* memory_;
  StreamUses uses_;
};

}  // namespace deep_ep
