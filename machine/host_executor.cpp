#include "machine/host_executor.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <utility>
#include <vector>

#include "csrc/memory/symmetric_heap.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {

namespace {

using host_machine::HostEvent;
using host_machine::HostStream;
using host_machine::LaunchQueue;
using host_machine::mix;

constexpr std::size_t kAlignment = 256;

/// Default stream of the executor that the thread made current. Weak: executors come and go, threads stay.
thread_local std::weak_ptr<HostStream> current_default_stream;

LaunchQueue& find_default_stream() {
  // The executor owns its stream, so the reference lives as long as it.
  if (const auto stream = current_default_stream.lock()) return *stream;
  throw Error("a kernel was launched into the default stream, but no host executor is current in this thread");
}

HostEvent* event_of(const EventHandle& event) { return static_cast<HostEvent*>(event.get()); }

void* aligned(std::size_t bytes) {
  void* memory = nullptr;
  if (posix_memalign(&memory, kAlignment, std::max<std::size_t>(bytes, 1)) != 0) {
    fail<OutOfMemory>("no {} of memory left", format_bytes(bytes));
  }
  return memory;
}

}  // namespace

HostExecutor::HostExecutor(const HostExecutorOptions& options)
    : pool_(host_machine::WorkerPool::instance()),
      owner_(pool_.new_owner()),
      seed_(options.seed != 0 ? options.seed : environment::unsigned_integer("DEEP_EP_HOST_SEED")) {
  policy_.multiprocessors = options.multiprocessors > 0 ? options.multiprocessors : 4;
  policy_.max_block_threads = 1024;
  policy_.warps_per_block = options.warps_per_block > 0 ? options.warps_per_block : 3;
  policy_.max_shared_bytes = options.max_shared_bytes > 0 ? options.max_shared_bytes : 64 * 1024;
  default_stream_ = make_stream();
  host_machine::default_queue.store(&find_default_stream, std::memory_order_release);
  if (current_default_stream.expired()) make_current();
}

HostExecutor::~HostExecutor() {
  if (default_stream_->inherited()) return;  // no thread of this process works for it
  // Work under way uses memory that goes away with the owner's other parts.
  default_stream_->drain();
  for (auto& [handle, stream] : streams_) stream->drain();
  pool_.forget(owner_);
}

void* HostExecutor::allocate(std::size_t bytes) { return aligned(bytes); }
void HostExecutor::free(void* memory) noexcept { std::free(memory); }

void HostExecutor::free_after(void* memory, StreamHandle handle) noexcept {
  if (memory == nullptr) return;
  if (default_stream_->inherited()) {
    std::free(memory);  // this process's copy, which no worker uses
  } else {
    stream(handle).enqueue([memory] { std::free(memory); }, /*always=*/true);
  }
}

void* HostExecutor::allocate_pinned(std::size_t bytes) {
  void* memory = aligned(bytes);
  std::memset(memory, 0, bytes);
  return memory;
}
void HostExecutor::free_pinned(void* memory) noexcept { std::free(memory); }

std::shared_ptr<HostStream> HostExecutor::make_stream() {
  const std::uint64_t number = streams_made_.fetch_add(1);
  return std::make_shared<HostStream>(pool_, owner_, seed_ == 0 ? 0 : mix(seed_, number), policy_.max_shared_bytes);
}

StreamHandle HostExecutor::create_stream() {
  auto made = make_stream();
  void* handle = static_cast<LaunchQueue*>(made.get());  // what launchers cast it back to
  const std::lock_guard lock(mutex_);
  streams_.emplace(handle, std::move(made));
  return handle;
}

void HostExecutor::destroy_stream(StreamHandle handle) noexcept {
  std::shared_ptr<Stream> gone;  // lives on until its queue is empty
  const std::lock_guard lock(mutex_);
  if (const auto found = streams_.find(handle); found != streams_.end()) {
    gone = std::move(found->second);
    streams_.erase(found);
  }
}

HostStream& HostExecutor::stream(StreamHandle handle) {
  return handle == nullptr ? *default_stream_ : static_cast<Stream&>(*static_cast<LaunchQueue*>(handle));
}

EventHandle HostExecutor::record_event(StreamHandle handle) { return stream(handle).record(); }

void HostExecutor::wait_event(StreamHandle handle, const EventHandle& event) {
  if (event != nullptr) stream(handle).wait(std::static_pointer_cast<HostEvent>(event));
}

bool HostExecutor::event_done(const EventHandle& event) { return event == nullptr || event_of(event)->done(); }

void HostExecutor::synchronize_event(const EventHandle& event) {
  if (event == nullptr || event_of(event)->done()) return;
  default_stream_->require_home();
  event_of(event)->wait();
}

void HostExecutor::synchronize(StreamHandle handle) { stream(handle).synchronize(); }

void HostExecutor::copy(void* destination, const void* source, std::size_t bytes, StreamHandle handle) {
  if (bytes > 0) stream(handle).enqueue([=] { std::memmove(destination, source, bytes); });
}

void HostExecutor::fill(void* destination, int byte, std::size_t bytes, StreamHandle handle) {
  if (bytes > 0) stream(handle).enqueue([=] { std::memset(destination, byte, bytes); });
}

double HostExecutor::elapsed_seconds(const EventHandle& begin, const EventHandle& end) {
  if (begin == nullptr || end == nullptr || !event_of(begin)->done() || !event_of(end)->done()) {
    throw InvalidArgument("elapsed_seconds: both events must be recorded and done");
  }
  return std::chrono::duration<double>(event_of(end)->time() - event_of(begin)->time()).count();
}

void HostExecutor::make_current() { current_default_stream = default_stream_; }

const KernelTable& HostExecutor::kernels() const { return host_kernels(); }

std::unique_ptr<SymmetricHeap> HostExecutor::create_heap(Bootstrap& bootstrap, const HeapOptions& options) {
  return make_host_heap(bootstrap, options);
}

std::shared_ptr<Executor> make_host_executor(const HostExecutorOptions& options) {
  return std::make_shared<HostExecutor>(options);
}

}  // namespace deep_ep
