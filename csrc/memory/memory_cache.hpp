// Memory of the executor's stream-ordered pool that one stream keeps using: what comes back is handed out again without
// asking the executor, which on a GPU would take locks of the driver.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "csrc/memory/home_stream.hpp"

namespace deep_ep {

/// Blocks may be released by any thread at any time, and are allocated by the thread that enqueues work on the home
/// stream while it does not record a graph.
class MemoryCache {
 public:
  struct Block {
    void* memory = nullptr;
    std::size_t bytes = 0;  ///< rounded up
  };

  /// AddressSanitizer has to see every release, so nothing is kept under it.
#ifdef __SANITIZE_ADDRESS__
  static constexpr bool kReuses = false;
#else
  static constexpr bool kReuses = true;
#endif
  /// Unused memory beyond this goes back to the executor before more is requested.
  static constexpr std::size_t kMostUnused = std::size_t{512} << 20;

  explicit MemoryCache(std::shared_ptr<HomeStream> home) : home_(std::move(home)) {}
  ~MemoryCache();
  MemoryCache(const MemoryCache&) = delete;
  MemoryCache& operator=(const MemoryCache&) = delete;

  /// Memory for work that is enqueued on the home stream from now on. The stream waits for its earlier users.
  Block allocate(std::size_t bytes);
  /// `events` are behind its last uses on other streams.
  void release(const Block& block, std::vector<EventHandle> events);
  /// The executor gets all unused memory, behind the work of the home stream.
  void give_back_all();

  std::size_t unused_bytes() const;
  const std::shared_ptr<HomeStream>& home() const { return home_; }

  /// What a request takes: sizes are rounded up by at most an eighth, so that tensors whose sizes vary a little from
  /// call to call share blocks.
  static std::size_t size_class(std::size_t bytes);

 private:
  struct Unused {
    Block block;
    std::vector<EventHandle> events;
  };

  void* take(std::size_t bytes);
  void give_back(const Unused& unused);

  std::shared_ptr<HomeStream> home_;
  mutable std::mutex mutex_;
  std::map<std::size_t, std::vector<Unused>> unused_;  ///< by size
  std::size_t unused_bytes_ = 0;
};

}  // namespace deep_ep
