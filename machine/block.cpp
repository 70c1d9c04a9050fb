// Scheduling of a block's threads. The waiting itself is in block_sync.cpp.
#include "machine/block.hpp"

#include <algorithm>
#include <exception>
#include <iterator>
#include <utility>

#include "csrc/support/format.hpp"

namespace deep_ep::host_machine {

namespace {

/// Leaves a kernel thread that must end because its kernel failed elsewhere. Not a std::exception: no kernel catches
/// it.
struct Aborted {};

constexpr int kSwitchesPerSlice = 4096;
/// So often may a thread meet its warp after a pause and still be taken to do nothing but poll: a warp that waits as a
/// whole asks its lanes between two looks. More than any such loop needs; who works meets more often.
constexpr int kMeetingsOfAPoll = 64;

}  // namespace

Block::Block(std::shared_ptr<Kernel> kernel, int index, FiberPool& fibers)
    : kernel_(std::move(kernel)),
      index_(index),
      pool_(fibers),
      random_(derive_seed(kernel_->seed, static_cast<std::uint64_t>(index))),
      shared_(kernel_->launch.shape.shared_bytes),
      warps_(static_cast<std::size_t>(kernel_->launch.shape.threads / Warp::kLanes)),
      barrier_(kernel_->launch.shape.threads) {
  const LaunchShape& shape = kernel_->launch.shape;
  fibers_.reserve(static_cast<std::size_t>(shape.threads));
  for (int thread = 0; thread < shape.threads; ++thread) {
    fibers_.push_back(pool_.take(kernel_->owner));
    fibers_.back()->prepare(*this, {.machine = this,
                                    .thread = thread,
                                    .block = index_,
                                    .block_threads = shape.threads,
                                    .grid_blocks = shape.blocks,
                                    .shared = shared_.data(),
                                    .shared_bytes = shape.shared_bytes,
                                    .perturbed = random_.enabled()});
    ready_.push_back(fibers_.back().get());
  }
  live_ = shape.threads;
}

Block::~Block() { std::ranges::move(fibers_, std::back_inserter(pool_.free_of(kernel_->owner))); }

Block::Slice Block::run(Context& worker) {
  if (random_.chance(4)) return Slice::idle;  // a late block
  worker_ = &worker;
  worker_tsan_context_ = tsan::current_context();
  quiet_ = 0;
  budget_ = kSwitchesPerSlice;
  progressed_ = false;
  if (kernel_->failed() && !aborting_) abort();
  if (Fiber* first = next()) go_on(worker, first);
  if (live_ == 0) {
    finish();
    kernel_->block_ended();
    return Slice::finished;
  }
  if (ready_.empty()) {
    kernel_->fail(describe_deadlock());
    abort();
    return Slice::progressed;
  }
  return progressed_ ? Slice::progressed : Slice::idle;
}

/// The fiber that runs next in this slice; null when the worker should look after other blocks.
Fiber* Block::next() {
  if (ready_.empty() || quiet_ >= ready_.size() || budget_-- <= 0) return nullptr;
  if (random_.enabled()) std::swap(ready_.front(), ready_[random_.below(static_cast<std::uint32_t>(ready_.size()))]);
  Fiber* const drawn = ready_.front();
  ready_.pop_front();
  return drawn;
}

/// Leaves `from` for a thread, or for the worker (null).
DEEP_EP_NO_TSAN void Block::go_on(Context& from, Fiber* thread, bool final) {
  current_ = thread;
  current_thread = thread == nullptr ? nullptr : &thread->state;
  switch_to(from, thread == nullptr ? *worker_ : *thread, final);
}

/// Leaves the running thread for another, or for the worker. Its fiber has been queued, or another one waits for it.
DEEP_EP_NO_TSAN void Block::suspend() {
  Fiber& self = *current_;
  Fiber* successor = next();
  if (successor != &self) go_on(self, successor);
  if (aborting_) throw Aborted();
}

void Block::yield() {
  ready_.push_back(current_);
  suspend();
}

/// The running thread waits with others.
void Block::park(Gathering& at) {
  at.waiting.push_back(current_);
  current_->waits = &at;
  suspend();
}

void Block::wake(Gathering& at) {
  for (Fiber* fiber : at.waiting) {
    fiber->waits = nullptr;
    ready_.push_back(fiber);
  }
  at.waiting.clear();
}

void Block::progress() {
  progressed_ = true;
  quiet_ = 0;
}

/// The running thread meets its warp: that is progress, unless it does so between two looks at what it waits for.
void Block::count_meeting() {
  if (current_->meetings_of_poll == 0 || ++current_->meetings_of_poll > kMeetingsOfAPoll) {
    current_->meetings_of_poll = 0;
    progress();
  }
}

/// In a seeded schedule, one time in `switches`: another thread goes first, or, one time in four, another block.
void Block::maybe_interleave(std::uint32_t switches) {
  if (!random_.chance(switches)) return;
  if (random_.chance(4)) budget_ = 0;
  yield();
}

/// All threads leave by exception, so that what lies on their stacks is destroyed.
void Block::abort() {
  aborting_ = true;
  quiet_ = 0;
  for (auto& fiber : fibers_) {
    if (std::exchange(fiber->waits, nullptr) != nullptr) ready_.push_back(fiber.get());
  }
}

/// Runs on the thread's own stack, but in the worker's ThreadSanitizer context.
DEEP_EP_NO_TSAN void Block::run_thread(Fiber& fiber) {
  if (!aborting_) {
    try {
      {
        const tsan::Scope as_thread(fiber.tsan_context);
        tsan::acquire(&kernel_->start_point);
        kernel_->launch.entry(kernel_->launch.params.get(), shared_.data());
      }
      finish_copies(fiber);
      fiber.returned = true;
    } catch (const Aborted&) {
      // Another thread has reported why.
    } catch (const std::exception& e) {
      kernel_->fail(fmt::format("block {}, thread {}: {}", index_, fiber.state.thread, e.what()));
    } catch (...) {
      kernel_->fail(fmt::format("block {}, thread {}: an exception of unknown type", index_, fiber.state.thread));
    }
  }
  {
    const tsan::Scope as_thread(fiber.tsan_context);
    tsan::release(&kernel_->end_point);
  }
  fiber.finished = true;
  --live_;
  progress();
  if (kernel_->failed() && !aborting_) abort();
  go_on(fiber, next(), /*final=*/true);
  std::terminate();  // no thread switches to a finished one
}

/// After the last thread: whatever is left over is a mistake.
void Block::finish() {
  if (kernel_->failed()) return;
  if (const std::string text = unfinished_mbarriers(); !text.empty()) {
    kernel_->fail(fmt::format("block {}: {}", index_, text));
  } else if (!shared_.canary_intact()) {
    kernel_->fail(fmt::format("block {}: a write past the end of its {} bytes of shared memory", index_,
                              kernel_->launch.shape.shared_bytes));
  }
}

std::string Block::describe_deadlock() const {
  const auto describe = [this](const Fiber& fiber) { return fiber.finished ? "have exited" : awaited(*fiber.waits); };
  std::string text = fmt::format("block {}: deadlock, no thread can go on:", index_);
  for (std::size_t first = 0; first < fibers_.size();) {
    const std::string what = describe(*fibers_[first]);
    std::size_t last = first;
    while (last + 1 < fibers_.size() && describe(*fibers_[last + 1]) == what) ++last;
    text += first == last ? fmt::format(" thread {} {};", first, what)
                          : fmt::format(" threads {}-{} {};", first, last, what);
    first = last + 1;
  }
  text.back() = '.';
  return text;
}

Warp& Block::current_warp() { return warps_[static_cast<std::size_t>(current_->state.thread / Warp::kLanes)]; }

void Block::pause(int spins) {
  const tsan::Scope as_worker(worker_tsan_context_);
  if (spins == 0) progressed_ = true;
  current_->meetings_of_poll = 1;
  ++quiet_;
  yield();
}

void Block::interleave() {
  const tsan::Scope as_worker(worker_tsan_context_);
  maybe_interleave(4);  // next to a flag, where it matters who is late
}

}  // namespace deep_ep::host_machine
