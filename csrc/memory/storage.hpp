// The memory behind the tensors that the library returns: of the arena, of a cache of device memory, or of the
// program's allocator.
//
// All keep everything alive that their memory needs, so a tensor may outlive the Buffer. All give the memory back
// without waiting (the end of a cache waits), behind the work of all streams that were recorded; those streams must
// still exist then (as for any GPU tensor). The home stream needs no recording: memory is given back to it. Memory that
// was used by a stream while it recorded a CUDA graph is reused by graphs at most, see Arena.
//
// Requests to the executor are what makes a call slow on the host, so there are few: one storage serves several tensors
// of a call, the call says once whether it is being recorded, and the end of a storage costs one query and one event
// for each stream other than the home and the default one.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/memory/arena.hpp"
#include "deep_ep/executor.hpp"
#include "deep_ep/result_allocator.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep {

// The order in which a buffer's memory is handed out: that of its calls. They run on the communication stream or on the
// callers' streams, each after the one before it, as if all were on one stream.

/// In place of an event: behind what the default stream holds when another stream waits. That stream never ends, so
/// nothing is recorded for callers who stay on it.
inline const EventHandle kDefaultStream = std::make_shared<char>();

/// Calls use the memory first, and they are in order: what earlier calls did with a piece of memory needs no event.
/// Other work of streams does. Thread-safe.
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
  /// Behind all calls that have ended; null when there was none. The next work has to wait for it.
  EventHandle latest() {
    const std::lock_guard lock(mutex_);
    return record_latest();
  }
  /// The same; null, too, when the latest work was on `stream` itself, whose order covers it.
  EventHandle latest_unless_on(StreamHandle stream) {
    const std::lock_guard lock(mutex_);
    return latest_on_ == stream ? nullptr : record_latest();
  }

 private:
  EventHandle record_latest() {
    if (latest_ == kDefaultStream) latest_ = executor_->record_event(nullptr);
    return latest_;
  }

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
  /// Its end calls `give_back(*this)`.
  using GiveBack = std::function<void(StreamStorage&)>;
  /// `recording`: it is allocated while a graph is recorded.
  StreamStorage(std::shared_ptr<HomeStream> home, void* data, bool recording, GiveBack give_back)
      : home_(std::move(home)),
        data_(static_cast<std::byte*>(data)),
        in_graph_(recording),
        give_back_(std::move(give_back)) {}
  ~StreamStorage() override;
  StreamStorage(const StreamStorage&) = delete;
  StreamStorage& operator=(const StreamStorage&) = delete;

  void record_stream(StreamHandle stream) override;
  bool knows_stream(StreamHandle stream) const override;
  /// The same for a caller who knows whether the stream is recording a graph.
  void record_stream(StreamHandle stream, bool recording);

  std::byte* data() const { return data_; }

  // For what gives the memory back, when nobody records any more.

  HomeStream& home() const { return *home_; }
  /// The streams that were recorded.
  const std::vector<StreamHandle>& users() const { return streams_; }
  /// Events behind what the streams have enqueued so far. Nothing if a graph may use the memory again: a stream was
  /// recording one when it was named, or is recording now. `at_home`, for memory that goes back to the home: without
  /// events of the home's own stream, and kDefaultStream for the default one.
  std::optional<std::vector<EventHandle>> end_of_use(bool at_home);

 private:
  std::shared_ptr<HomeStream> home_;
  std::byte* data_;
  mutable std::mutex mutex_;
  std::vector<StreamHandle> streams_;
  bool in_graph_;
  GiveBack give_back_;
};

/// From the arena, in the order of the home stream, which records no graph. All users of an arena have the same home.
/// nullptr when the arena has no room.
std::shared_ptr<StreamStorage> allocate_in_arena(const std::shared_ptr<Arena>& arena, std::size_t bytes,
                                                 const std::shared_ptr<HomeStream>& home);

// Memory of the executor that one stream keeps using: what comes back is handed out again without asking the executor,
// which on a GPU would take locks of the driver, and wait.

/// Replays of a graph use memory at any later time, so what a graph may use stays until the cache goes. Blocks may be
/// released by any thread at any time, and are allocated by the thread that enqueues work on the home stream while it
/// does not record a graph.
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
  /// Memory for work that the home stream records.
  Block allocate_for_graph(std::size_t bytes) { return {.memory = home_->executor().allocate(bytes), .bytes = bytes}; }
  /// `events` are behind its last uses on other streams; nothing: a graph may use the memory again.
  void release(const Block& block, std::optional<std::vector<EventHandle>> events);
  /// The executor gets unused memory, the largest blocks first, until at most so many bytes are left; behind the work
  /// of the home stream, for which the host waits on a GPU.
  void give_back_unused(std::size_t most = 0);

  std::size_t unused_bytes() const;
  const std::shared_ptr<HomeStream>& home() const { return home_; }

  /// The size that a request takes: sizes are rounded up by at most an eighth, so that tensors whose sizes vary a
  /// little from call to call share blocks.
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
  std::vector<void*> of_graphs_;
};

/// `recording`: the home stream records a graph.
std::shared_ptr<StreamStorage> allocate_in_pool(const std::shared_ptr<MemoryCache>& cache, std::size_t bytes,
                                                bool recording = false);

// Memory for results from the program's allocator: see deep_ep/result_allocator.hpp.

/// The pieces that a buffer has from the program's allocator. A piece goes back at once where only the stream that it
/// was allocated for has used it, otherwise when the work of the others has ended: as frameworks do it with memory that
/// several streams use. In a recording it goes back at once, too, behind the recorded work of the others.
class ProgramMemory {
 public:
  ProgramMemory(std::shared_ptr<Executor> executor, std::shared_ptr<ResultAllocator> allocator)
      : executor_(std::move(executor)), allocator_(std::move(allocator)) {}
  /// Waits for the work that uses what is still here.
  ~ProgramMemory();
  ProgramMemory(const ProgramMemory&) = delete;
  ProgramMemory& operator=(const ProgramMemory&) = delete;

  ResultAllocator::Memory allocate(std::size_t bytes, StreamHandle stream);

  struct Use {
    StreamHandle stream;                      ///< that it was allocated for
    const std::vector<StreamHandle>& others;  ///< that were named as users
    EventHandle calls;                        ///< behind calls on other streams that may have used it; null: none
    bool of_graph;                            ///< it was allocated while a graph was recorded
  };
  void release(ResultAllocator::Memory memory, const Use& use);

 private:
  struct Kept {
    ResultAllocator::Memory memory;
    std::vector<EventHandle> until;  ///< empty: a graph may use it again, so it goes back with the buffer
  };
  void release_recorded(const Use& use);
  void give_back_what_has_ended();
  /// The host waits for the work that uses memory which then goes back. False: there is none.
  bool wait_for_kept();

  std::shared_ptr<Executor> executor_;
  std::shared_ptr<ResultAllocator> allocator_;
  std::mutex mutex_;
  std::vector<Kept> kept_;
};

/// `stream`: the caller's, for which the memory is allocated. The home stream comes after it.
std::shared_ptr<StreamStorage> allocate_of_program(const std::shared_ptr<ProgramMemory>& memory, std::size_t bytes,
                                                   StreamHandle stream, const std::shared_ptr<HomeStream>& home,
                                                   bool recording);

}  // namespace deep_ep
