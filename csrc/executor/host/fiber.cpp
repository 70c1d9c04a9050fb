#include "csrc/executor/host/fiber.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "csrc/executor/host/block.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::host_machine {

namespace {

// Address space, not memory: only pages that a kernel touches are ever backed. Redzones make frames larger.
constexpr std::size_t kStackBytes = (DEEP_EP_ASAN ? 512 : 128) * 1024;

std::size_t guard_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

#if DEEP_EP_TSAN
// The runtime of ThreadSanitizer aborts the process when it knows more than some 8,100 contexts.
constexpr int kMostContexts = 8000;
std::atomic<int> live_contexts{0};
#endif

}  // namespace

Fiber::Fiber() {
  void* memory = mmap(nullptr, guard_bytes() + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) {
    fail<OutOfMemory>("no stack for one more kernel thread on the host: {}", errno_text(errno));
  }
  // Stacks grow down: running over the end hits this page. Without it (out of mappings) a kernel still runs.
  mprotect(memory, guard_bytes(), PROT_NONE);
  stack_bottom = static_cast<std::byte*>(memory) + guard_bytes();
  stack_size = kStackBytes;
}

Fiber::~Fiber() {
  munmap(static_cast<std::byte*>(const_cast<void*>(stack_bottom)) - guard_bytes(), guard_bytes() + kStackBytes);
}

void Fiber::prepare(Block& owner, const ThreadState& thread) {
#if DEEP_EP_TSAN
  if (live_contexts.fetch_add(1) >= kMostContexts) {
    live_contexts.fetch_sub(1);
    fail<OutOfMemory>("more than {} kernel threads at once; ThreadSanitizer cannot follow them", kMostContexts);
  }
#endif
  // A new context for every thread: one that is reused would look synchronised with whatever it ran before.
  tsan_context = tsan::create_context();
  block = &owner;
  state = thread;
  wait = Wait::nothing;
  point = boost::context::detail::make_fcontext(
      const_cast<std::byte*>(static_cast<const std::byte*>(stack_bottom)) + stack_size, stack_size, &Fiber::enter);
}

void Fiber::retire() {
#if DEEP_EP_ASAN
  // A thread that ended by an exception may leave poisoned frames behind.
  __asan_unpoison_memory_region(stack_bottom, stack_size);
#endif
  if (tsan_context != nullptr) {
    tsan::destroy_context(tsan_context);
    tsan_context = nullptr;
#if DEEP_EP_TSAN
    live_contexts.fetch_sub(1);
#endif
  }
  block = nullptr;
}

DEEP_EP_NO_TSAN void Fiber::enter(boost::context::detail::transfer_t from) {
#if DEEP_EP_ASAN
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  auto* before = static_cast<Context*>(from.data);
  before->point = from.fctx;
  auto& self = static_cast<Fiber&>(*before->target);
  self.block->run_thread(self);  // leaves by switching away for good
}

std::unique_ptr<Fiber> FiberPool::take() {
  if (free_.empty()) return std::make_unique<Fiber>();
  auto fiber = std::move(free_.back());
  free_.pop_back();
  return fiber;
}

void FiberPool::give_back(std::unique_ptr<Fiber> fiber) {
  fiber->retire();
  free_.push_back(std::move(fiber));
}

}  // namespace deep_ep::host_machine
