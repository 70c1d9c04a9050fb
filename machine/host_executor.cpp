// The executor of machines without a GPU.
#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>

#include "csrc/executor/backend.hpp"
#include "csrc/memory/symmetric_heap.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "machine/random.hpp"
#include "machine/stream.hpp"

namespace deep_ep {

namespace {

using host_machine::HostEvent;
using host_machine::HostStream;

/// Default stream of the executor that the thread made current. Weak: executors come and go, threads stay.
thread_local std::weak_ptr<HostStream> current_default_stream;

void launch(host_machine::KernelLaunch kernel, void* stream) {
  if (stream != nullptr) return static_cast<HostStream*>(stream)->launch(std::move(kernel));
  const auto by_default = current_default_stream.lock();
  if (by_default == nullptr) {
    throw Error("a kernel was launched into the default stream, but no host executor is current in this thread");
  }
  by_default->launch(std::move(kernel));
}

class HostExecutor final : public Backend, public std::enable_shared_from_this<HostExecutor> {
 public:
  explicit HostExecutor(const HostExecutorOptions& options)
      : seed_(options.seed != 0 ? options.seed : environment::unsigned_integer("DEEP_EP_HOST_SEED")) {
    policy_.multiprocessors = options.multiprocessors > 0 ? options.multiprocessors : 4;
    policy_.warps_per_block = options.warps_per_block > 0 ? options.warps_per_block : 3;
    policy_.max_shared_bytes = options.max_shared_bytes > 0 ? options.max_shared_bytes : 64 * 1024;
    default_stream_ = make_stream();
    if (current_default_stream.expired()) HostExecutor::make_current();
  }
  ~HostExecutor() override {
    if (default_stream_->inherited()) return;  // no thread of this process works for it
    // Work under way uses memory that goes away with the owner's other parts.
    default_stream_->record()->wait();
    for (auto& [handle, stream] : streams_) stream->record()->wait();
    host_machine::WorkerPool::instance().forget(this);
  }

  Device device() const override { return {Device::Kind::cpu, 0}; }
  const LaunchPolicy& policy() const override { return policy_; }

  void* allocate(std::size_t bytes) override {
    constexpr std::size_t kAlignment = 256;
    void* memory = nullptr;
    if (posix_memalign(&memory, kAlignment, std::max<std::size_t>(bytes, 1)) != 0) {
      fail<OutOfMemory>("no {} of memory left", format_bytes(bytes));
    }
    return memory;
  }
  void free(void* memory) noexcept override { std::free(memory); }
  void free_after(void* memory, StreamHandle stream) noexcept override {
    if (memory == nullptr) return;
    if (default_stream_->inherited()) {
      std::free(memory);  // this process's copy, which no worker uses
    } else {
      of(stream).enqueue([memory] { std::free(memory); }, /*always=*/true);
    }
  }
  void* allocate_pinned(std::size_t bytes) override { return std::memset(allocate(bytes), 0, bytes); }
  void free_pinned(void* memory) noexcept override { std::free(memory); }

  StreamHandle create_stream() override {
    auto made = make_stream();
    void* handle = made.get();
    const std::lock_guard lock(mutex_);
    streams_.emplace(handle, std::move(made));
    return handle;
  }
  void destroy_stream(StreamHandle stream) noexcept override {
    std::shared_ptr<HostStream> gone;  // lives on until its queue is empty
    const std::lock_guard lock(mutex_);
    if (const auto found = streams_.find(stream); found != streams_.end()) {
      gone = std::move(found->second);
      streams_.erase(found);
    }
  }

  EventHandle record_event(StreamHandle stream) override { return of(stream).record(); }
  EventHandle record_timed_event(StreamHandle stream) override { return record_event(stream); }
  void wait_event(StreamHandle stream, const EventHandle& event) override {
    if (event != nullptr) of(stream).wait(std::static_pointer_cast<HostEvent>(event));
  }
  bool event_done(const EventHandle& event) override { return event == nullptr || of(event).done(); }
  void synchronize_event(const EventHandle& event) override {
    if (event_done(event)) return;
    default_stream_->require_home();
    of(event).wait();
  }
  double elapsed_seconds(const EventHandle& begin, const EventHandle& end) override {
    if (begin == nullptr || end == nullptr || !of(begin).done() || !of(end).done()) {
      throw InvalidArgument("elapsed_seconds: both events must be recorded and done");
    }
    return std::chrono::duration<double>(of(end).time - of(begin).time).count();
  }
  void synchronize(StreamHandle stream) override { of(stream).synchronize(); }
  std::uint64_t capture_id(StreamHandle) override { return 0; }

  void copy(void* destination, const void* source, std::size_t bytes, StreamHandle stream) override {
    if (bytes > 0) of(stream).enqueue([=] { std::memmove(destination, source, bytes); });
  }
  void fill(void* destination, int byte, std::size_t bytes, StreamHandle stream) override {
    if (bytes > 0) of(stream).enqueue([=] { std::memset(destination, byte, bytes); });
  }

  /// From now on a kernel that this thread launches into stream nullptr goes to this executor's default stream.
  void make_current() override { current_default_stream = default_stream_; }

  const KernelTable& kernels() const override { return host_kernels(); }
  void load_kernels() const override {}
  std::unique_ptr<SymmetricHeap> create_heap(Bootstrap& bootstrap, const HeapBytes& bytes_for) override {
    return std::make_unique<SymmetricHeap>(shared_from_this(), make_host_heap_memory(), bootstrap, bytes_for);
  }

 private:
  std::shared_ptr<HostStream> make_stream() {
    return std::make_shared<HostStream>(this, host_machine::derive_seed(seed_, streams_made_.fetch_add(1)),
                                        policy_.max_shared_bytes);
  }
  HostStream& of(StreamHandle stream) {
    return stream == nullptr ? *default_stream_ : *static_cast<HostStream*>(stream);
  }
  static HostEvent& of(const EventHandle& event) { return *static_cast<HostEvent*>(event.get()); }

  LaunchPolicy policy_;
  const std::uint64_t seed_;
  std::atomic<std::uint64_t> streams_made_{0};
  std::shared_ptr<HostStream> default_stream_;
  std::mutex mutex_;
  std::unordered_map<void*, std::shared_ptr<HostStream>> streams_;  ///< by handle
};

}  // namespace

void (*host_machine::enqueue)(KernelLaunch launch, void* stream) = &launch;

const KernelTable& host_kernels() {
#define DEEP_EP_LAUNCHER(name, Params, max_threads) .name = kernels::name::launch_host,
  static const KernelTable table{DEEP_EP_KERNELS(DEEP_EP_LAUNCHER)};
#undef DEEP_EP_LAUNCHER
  return table;
}

std::shared_ptr<Executor> make_host_executor(const HostExecutorOptions& options) {
  return std::make_shared<HostExecutor>(options);
}

}  // namespace deep_ep
