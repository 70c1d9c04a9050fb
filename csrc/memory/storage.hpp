// The memory behind the tensors that the library returns: of the arena, or of a cache of device memory.
//
// Both keep everything alive that their memory needs, so a tensor may outlive the Buffer. Both give the memory back
// without waiting (the end of a cache waits), behind the work of all streams that were recorded; those streams must
// still exist then (as for any GPU tensor). The home stream needs no recording: memory is given back to it.
//
// Requests to the executor are what makes a call slow on the host, so there are few: one storage serves several tensors
// of a call, the call says once whether it is being recorded, and the end of a storage costs one query and one event
// for each stream other than the default one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/memory/arena.hpp"
#include "deep_ep/executor.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// In place of an event: behind what the default stream holds when another stream waits. That stream never ends, so
/// nothing is recorded for callers who stay on it.
inline const EventHandle kDefaultStream = std::make_shared<char>();

/// The order in which a buffer's memory is handed out: that of its calls, each after the one before it, on whichever
/// streams they run. What earlier calls did with a piece of memory needs no event, other work does. Thread-safe.
class HomeStream {
 public:
  HomeStream(std::shared_ptr<Executor> executor, StreamHandle stream)
      : executor_(std::move(executor)), stream_(stream) {}

  Executor& executor() const { return *executor_; }
  /// The real stream of the call under way; between calls, the communication stream.
  StreamHandle handle() const { return stream_.load(std::memory_order_relaxed); }
  void works_on(StreamHandle stream) { stream_.store(stream, std::memory_order_relaxed); }
  /// Work on handle() comes behind `event`, which may be kDefaultStream.
  void wait_for(const EventHandle& event) const {
    if (event != kDefaultStream) {
      executor_->wait_event(handle(), event);
    } else if (handle() != nullptr) {
      executor_->wait_event(handle(), executor_->record_event(nullptr));
    }
  }

  /// A call has ended, `behind` all its work, which may be kDefaultStream. Calls that are recorded into a graph do not
  /// count: they do not run now.
  void work_ends(EventHandle behind) {
    const std::lock_guard lock(mutex_);
    latest_ = std::move(behind);
    latest_on_ = handle();
  }
  /// Behind all calls that have ended: work on `stream` has to wait for it. Null where there was none, or where both
  /// are on the default stream, whose order covers it (any other handle may by now belong to another stream).
  EventHandle latest_for(StreamHandle stream) {
    const std::lock_guard lock(mutex_);
    if (stream == nullptr && latest_on_ == nullptr) return nullptr;
    if (latest_ == kDefaultStream) latest_ = executor_->record_event(nullptr);
    return latest_;
  }

 private:
  std::shared_ptr<Executor> executor_;
  std::atomic<StreamHandle> stream_;
  std::mutex mutex_;
  EventHandle latest_;
  StreamHandle latest_on_ = nullptr;
};

/// Memory that is first used on the home stream, and the other streams that use it. Tensors are copied between threads,
/// so it locks.
class StreamStorage final : public Tensor::Storage {
 public:
  /// Takes the memory back when nobody records any more, with events behind what the streams have enqueued so far;
  /// inside the recording, if it is allocated in one that goes on. Nothing: a graph may use the memory again.
  using Release = std::function<void(std::optional<std::vector<EventHandle>> events)>;

  /// `graph`: the recording that it is allocated in; 0: none. `to_home`: the memory goes back to the home, with
  /// kDefaultStream for the default one. A caller may have named the communication stream, for work that HomeStream
  /// does not know of.
  StreamStorage(void* memory, std::shared_ptr<HomeStream> home, std::uint64_t graph, bool to_home, Release release)
      : data_(static_cast<std::byte*>(memory)),
        home_(std::move(home)),
        graph_(graph),
        to_home_(to_home),
        release_(std::move(release)) {}
  ~StreamStorage() override;
  StreamStorage(const StreamStorage&) = delete;
  StreamStorage& operator=(const StreamStorage&) = delete;

  void record_stream(StreamHandle stream) override;
  bool knows_stream(StreamHandle stream) const override;
  /// The same for a caller who knows the recording that the stream takes part in; 0: none.
  void record_stream(StreamHandle stream, std::uint64_t graph);

  std::byte* data() const { return data_; }

 private:
  std::optional<std::vector<EventHandle>> end_of_use() const;

  std::byte* const data_;
  const std::shared_ptr<HomeStream> home_;
  const std::uint64_t graph_;
  const bool to_home_;
  const Release release_;
  mutable std::mutex mutex_;
  std::vector<StreamHandle> streams_;
  bool in_other_graph_ = false;
};

/// From the arena, in the order of the home stream, which records no graph. All users of an arena have the same home.
/// nullptr when the arena has no room.
std::shared_ptr<StreamStorage> allocate_in_arena(const std::shared_ptr<Arena>& arena, std::size_t bytes,
                                                 const std::shared_ptr<HomeStream>& home);

// Memory of the executor that one stream keeps using: what comes back is handed out again without asking the executor,
// which on a GPU would take locks of the driver, and wait.

/// Replays of a graph use memory at any later time, so what a graph may use stays until the cache goes; only the graph
/// itself, while it is recorded, uses it again. Blocks may be released by any thread at any time, and are allocated by
/// the thread that enqueues work on the home stream.
class MemoryCache {
 public:
  struct Block {
    void* memory = nullptr;
    std::size_t bytes = 0;                 ///< rounded up
    std::uint64_t graph = 0;               ///< the recording that it is for; 0: none
    std::vector<EventHandle> events = {};  ///< of an unused one, behind its last uses on other streams
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

  /// Memory for work that is enqueued on the home stream from now on, or recorded there into `graph`. The stream waits
  /// for its earlier users.
  Block allocate(std::size_t bytes, std::uint64_t graph = 0);
  /// `events` are behind its last uses on other streams; nothing: a graph may use the memory again.
  void release(Block block, std::optional<std::vector<EventHandle>> events);
  /// The executor gets unused memory, the largest blocks first, until at most so many bytes are left; behind the work
  /// of the home stream, for which the host waits on a GPU.
  void give_back_unused(std::size_t most = 0);

  const std::shared_ptr<HomeStream>& home() const { return home_; }

  /// The size that a request takes: sizes are rounded up by at most an eighth, so that tensors whose sizes vary a
  /// little from call to call share blocks.
  static std::size_t size_class(std::size_t bytes);

 private:
  /// Blocks of one size and one recording.
  using Key = std::pair<std::uint64_t, std::size_t>;
  static constexpr std::uint64_t kNoRecording = ~std::uint64_t{0};  ///< whose blocks are not for use again

  void give_back(const Block& block) noexcept;

  std::shared_ptr<HomeStream> home_;
  mutable std::mutex mutex_;
  std::map<Key, std::vector<Block>> unused_;
  std::size_t unused_bytes_ = 0;  ///< that no graph may use
};

/// `graph`: the recording that the home stream takes part in; 0: none.
std::shared_ptr<StreamStorage> allocate_in_pool(const std::shared_ptr<MemoryCache>& cache, std::size_t bytes,
                                                std::uint64_t graph = 0);

}  // namespace deep_ep
