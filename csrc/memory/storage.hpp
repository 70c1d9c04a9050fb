// The memory behind the tensors that the library returns: memory of the arena, or of the executor's stream-ordered
// pool; or, see program_memory.hpp, of the program's allocator.
//
// Both keep everything alive that their memory needs, so a tensor may outlive the Buffer. Both give the memory back
// without waiting, behind the work of all streams that were recorded; those streams must still exist then (as for any
// GPU tensor). The home stream needs no recording: memory is given back to it. Memory that was used by a stream while
// it recorded a CUDA graph is reused by graphs at most, see Arena.
//
// Requests to the executor are what makes a call slow on the host, so there are few: one storage serves several tensors
// of a call, the call says once whether it is being recorded, and the end of a storage costs one query and one event
// for each stream other than the home.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "csrc/memory/arena.hpp"
#include "csrc/memory/home_stream.hpp"
#include "csrc/memory/memory_cache.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// Memory that is first used on the home stream, and the other streams that use it. Tensors are copied between threads,
/// so it locks.
class StreamStorage : public Tensor::Storage {
 public:
  void record_stream(StreamHandle stream) override;
  bool knows_stream(StreamHandle stream) const override;
  /// The same for a caller who knows whether the stream is recording a graph.
  void record_stream(StreamHandle stream, bool recording);
  /// Nothing enqueued or recorded so far touches the memory: it goes back like that, and no graph keeps it.
  void never_used();

  virtual std::byte* data() const = 0;

 protected:
  StreamStorage(std::shared_ptr<HomeStream> home, bool recording) : home_(std::move(home)), in_graph_(recording) {}

  HomeStream& home() const { return *home_; }
  /// The streams that were recorded. For destructors: nobody records any more.
  const std::vector<StreamHandle>& users() const { return streams_; }
  /// Events behind what the streams have enqueued so far, without those of `skip`. Nothing if a graph may use the
  /// memory again: a stream was recording one when it was named, or is recording now.
  std::optional<std::vector<EventHandle>> end_of_use(const StreamHandle* skip = nullptr);
  /// The same for memory that was allocated for a graph, and that only graphs will get again. What streams are
  /// recording now is no event: the home, which records with them, waits for it in the graph. Nothing if it does not
  /// record.
  std::optional<std::vector<EventHandle>> end_of_recorded_use();

 private:
  std::shared_ptr<HomeStream> home_;
  mutable std::mutex mutex_;
  std::vector<StreamHandle> streams_;
  bool in_graph_;
};

class ArenaStorage final : public StreamStorage {
 public:
  /// Owns `block`. The caller has made the home stream wait for Allocation::wait_for.
  ArenaStorage(std::shared_ptr<Arena> arena, const Arena::Block& block, std::shared_ptr<HomeStream> home,
               bool recording);
  ~ArenaStorage() override;
  ArenaStorage(const ArenaStorage&) = delete;
  ArenaStorage& operator=(const ArenaStorage&) = delete;

  const Arena::Block& block() const { return block_; }
  std::byte* data() const override { return arena_->address(block_); }

  /// Allocates from the arena in the order of the home stream, waits included. All users of an arena have the same
  /// home. `recording`: the memory is for a graph. nullptr when the arena has no room.
  static std::shared_ptr<ArenaStorage> allocate(const std::shared_ptr<Arena>& arena, std::size_t bytes,
                                                const std::shared_ptr<HomeStream>& home, bool recording = false);

 private:
  std::shared_ptr<Arena> arena_;
  Arena::Block block_;
  bool for_graph_;  ///< it was allocated for one
};

class PoolStorage final : public StreamStorage {
 public:
  /// From the cache or, if the home stream records a graph, fresh from the executor.
  PoolStorage(std::shared_ptr<MemoryCache> cache, std::size_t bytes, bool recording = false);
  ~PoolStorage() override;
  PoolStorage(const PoolStorage&) = delete;
  PoolStorage& operator=(const PoolStorage&) = delete;

  std::byte* data() const override { return static_cast<std::byte*>(block_.memory); }

 private:
  std::shared_ptr<MemoryCache> cache_;
  MemoryCache::Block block_;
};

}  // namespace deep_ep
