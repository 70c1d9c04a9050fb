#include "machine/fiber.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "csrc/support/format.hpp"
#include "machine/block.hpp"

namespace deep_ep::host_machine {

namespace {

// Address space, not memory: only pages that a kernel touches are ever backed. Redzones make frames larger.
constexpr std::size_t kStackBytes = (DEEP_EP_ASAN ? 512 : DEEP_EP_TSAN ? 64 : 128) * 1024;

// Stacks that begin at the same offset of a page would all compete for the same few cache lines.
constexpr std::size_t kColours = 32;
constexpr std::size_t kColourBytes = 5 * 64;
std::atomic<std::size_t> next_colour{0};

std::size_t guard_bytes() {
  static const auto bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

}  // namespace

Fiber::Fiber(const void* birth_point) {
  void* memory = mmap(nullptr, guard_bytes() + kStackBytes, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_STACK, -1, 0);
  if (memory == MAP_FAILED) {
    fail<OutOfMemory>("no stack for one more kernel thread on the host: {}", errno_text(errno));
  }
  // Stacks grow down: running over the end hits this page. If there is no mapping left for it, kernels still run.
  mprotect(memory, guard_bytes(), PROT_NONE);
  stack_bottom = static_cast<std::byte*>(memory) + guard_bytes();
  stack_size = kStackBytes - next_colour.fetch_add(1, std::memory_order_relaxed) % kColours * kColourBytes;
  tsan_context = tsan::create_context();
  const tsan::Scope as_fiber(tsan_context);
  tsan::acquire(birth_point);
}

Fiber::~Fiber() {
  tsan::destroy_context(tsan_context);
  munmap(static_cast<std::byte*>(const_cast<void*>(stack_bottom)) - guard_bytes(), guard_bytes() + kStackBytes);
}

void Fiber::prepare(Block& owner, const ThreadState& thread) {
#if DEEP_EP_ASAN
  // A thread that ended by an exception may have left poisoned frames behind, any other one only those that never
  // return: all of a stack's shadow would take a third of a short kernel's time.
  constexpr std::size_t kFramesThatNeverReturn = 8 * 1024;
  const std::size_t poisoned = returned ? kFramesThatNeverReturn : stack_size;
  __asan_unpoison_memory_region(static_cast<const std::byte*>(stack_bottom) + stack_size - poisoned, poisoned);
  returned = false;
#endif
  block = &owner;
  state = thread;
  waits = nullptr;
  finished = false;
  meetings_of_poll = 0;
  copies = {};
  past = {};
  host_machine::prepare(*this);
}

void Fiber::enter() { block->run_thread(*this); }

std::unique_ptr<Fiber> FiberPool::take(const void* owner) {
  auto& free = free_of(owner);
  if (free.empty()) return std::make_unique<Fiber>(&birth_point_);
  auto fiber = std::move(free.back());
  free.pop_back();
  return fiber;
}

}  // namespace deep_ep::host_machine
