#include "machine/stream.hpp"

#include <utility>

#include "csrc/support/format.hpp"
#include "deep_ep/interrupt.hpp"
#include "machine/random.hpp"
#include "machine/sanitizers.hpp"

namespace deep_ep::host_machine {
namespace {

constexpr auto kInterruptPeriod = std::chrono::milliseconds(50);

}  // namespace

// ---- HostEvent ----

void HostEvent::complete() {
  std::vector<std::function<void()>> then;
  {
    const std::lock_guard lock(mutex_);
    done_ = true;
    time = Clock::now();
    then.swap(then_);
    completed_.notify_all();
  }
  for (auto& call : then) call();
}

bool HostEvent::wait(Clock::duration most) {
  {
    std::unique_lock lock(mutex_);
    if (!completed_.wait_for(lock, most, [this] { return done_; })) return false;
  }
  tsan::acquire(&sync_point);
  return true;
}

bool HostEvent::on_completion(std::function<void()> then) {
  const std::lock_guard lock(mutex_);
  if (done_) return false;
  then_.push_back(std::move(then));
  return true;
}

// ---- HostStream ----

HostStream::HostStream(const void* owner, std::uint64_t seed, std::size_t max_shared_bytes)
    : owner_(owner), seed_(seed), max_shared_bytes_(max_shared_bytes), tsan_context_(tsan::create_context()) {}

HostStream::~HostStream() { tsan::destroy_context(tsan_context_); }

void HostStream::launch(KernelLaunch kernel) {
  constexpr int kMostThreads = 1024;
  if (kernel.shape.threads > kMostThreads || kernel.shape.shared_bytes > max_shared_bytes_) {
    fail<InvalidArgument>("kernel {}: blocks of {} threads with {} bytes of shared memory; allowed: {} and {}",
                          kernel.name, kernel.shape.threads, kernel.shape.shared_bytes, kMostThreads,
                          max_shared_bytes_);
  }
  add([this, kernel = std::move(kernel)] { return failed() || start(kernel); });
}

void HostStream::enqueue(std::function<void()> work, bool always) {
  add([this, work = std::move(work), always] {
    if (failed() && !always) return true;
    const tsan::Scope as_stream(tsan_context_);
    work();
    return true;
  });
}

std::shared_ptr<HostEvent> HostStream::record() {
  auto event = std::make_shared<HostEvent>();
  add([this, event] {
    event->failure = failure();
    tsan::release_as(tsan_context_, &event->sync_point);
    event->complete();
    return true;
  });
  return event;
}

void HostStream::wait(std::shared_ptr<HostEvent> event) {
  // The event is kept alive by the operation behind, and the stream by the call that the event holds until then.
  add([this, event] { return !event->on_completion([self = shared_from_this()] { self->resume(); }); });
  add([this, event = std::move(event)] {
    tsan::acquire_as(tsan_context_, &event->sync_point);
    fail_with(event->failure);
    return true;
  });
}

void HostStream::synchronize() {
  const auto end = record();
  while (!end->wait(kInterruptPeriod)) {
    if (InterruptScope::wanted()) throw Interrupted("a wait for the CPU executor was interrupted");
  }
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    text.swap(failure_);
  }
  if (!text.empty()) throw Error(text);
}

void HostStream::require_home() const {
  if (!inherited()) return;
  throw Error("an executor was used in a child forked after it was made: only the process that made it can use it");
}

void HostStream::add(std::function<bool()> step) {
  require_home();
  const std::lock_guard lock(mutex_);
  if (!busy_) resume();  // it takes nothing before the lock is free
  busy_ = true;
  queue_.push_back({std::move(step)});
  tsan::release(&queue_.back().sync_point);
}

/// The pool continues with the queue. The stream stays alive until it is empty.
void HostStream::resume() {
  pool_.post([self = shared_from_this()] { self->pump(); });
}

/// On a worker: does operations until the queue is empty or one of them has to be waited for.
void HostStream::pump() {
  for (;;) {
    std::function<bool()> step;
    {
      const std::lock_guard lock(mutex_);
      if (queue_.empty()) {
        busy_ = false;
        return;
      }
      step = std::move(queue_.front().step);
      tsan::acquire_as(tsan_context_, &queue_.front().sync_point);
      queue_.pop_front();
    }
    if (!step()) return;
  }
}

bool HostStream::start(KernelLaunch launch) {
  auto kernel =
      std::make_shared<Kernel>(std::move(launch), shared_from_this(), owner_, derive_seed(seed_, launches_++));
  tsan::release_as(tsan_context_, &kernel->start_point);
  pool_.start(kernel);
  return false;
}

void Kernel::fail(const std::string& text) {
  stream_->fail_with("kernel " + std::string(launch.name) + ", " + text);
  failed_.store(true, std::memory_order_release);
}

void Kernel::block_ended() {
  if (blocks_left_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  tsan::acquire_as(stream_->tsan_context_, &end_point);
  stream_->pump();
}

void HostStream::fail_with(const std::string& text) {
  const std::lock_guard lock(mutex_);
  if (failure_.empty()) failure_ = text;
}

std::string HostStream::failure() {
  const std::lock_guard lock(mutex_);
  return failure_;
}

}  // namespace deep_ep::host_machine
