// What the host versions of the primitives ask of the machine that runs them. The machine itself (fibers, workers,
// delayed copies) is the folder machine/; this is only its interface, so that kernels need not know it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deep_ep::host_machine {

/// Distance between two lanes' values in what warp_exchange returns; also the largest value.
inline constexpr int kExchangeSlot = 16;

/// Operations that need more than this thread. Every one may switch to another thread of the block (all threads of a
/// block live on one worker thread, so nothing here is atomic). Misuse throws and fails the launch.
class Machine {
 public:
  virtual ~Machine() = default;

  /// Lets others run. `spins` counts the polls of this wait so far; 0 says that something was achieved before.
  virtual void pause(int spins) = 0;
  /// A point where a seeded schedule may switch although nothing requires it.
  virtual void interleave() = 0;

  /// Returns when all lanes of the warp came. Orders memory among them.
  virtual void warp_sync() = 0;
  /// Gives `bytes` of this lane, which is at warp::`op` as all 32 lanes must be; returns 32 slots with what the lanes
  /// gave, valid until this lane's next-but-one exchange. Does not order memory (neither does a shuffle on a GPU).
  virtual const std::byte* warp_exchange(const char* op, const void* value, int bytes) = 0;

  /// Returns when all threads of the block came: whether `good` was true in every one. Orders memory among them.
  virtual bool block_sync(bool good) = 0;

  virtual void mbarrier_init(std::uint64_t& word) = 0;
  virtual void mbarrier_fence_init() = 0;
  virtual void mbarrier_arrive(std::uint64_t& word, std::uint32_t expected_bytes) = 0;
  virtual void mbarrier_wait(std::uint64_t& word, std::uint32_t parity) = 0;

  virtual void bulk_load(void* shared, const void* global, std::uint32_t bytes, std::uint64_t& mbarrier) = 0;
  virtual void bulk_store(void* global, const void* shared, std::uint32_t bytes) = 0;
  virtual void bulk_commit() = 0;
  /// `reads_alone`: until they have read shared memory; otherwise until they are complete.
  virtual void bulk_wait(int groups_left, bool reads_alone) = 0;
  virtual void bulk_fence_global() = 0;
};

/// Who is running. One per fiber, made by the machine.
struct ThreadState {
  Machine* machine = nullptr;
  int thread = 0;
  int block = 0;
  int block_threads = 0;
  int grid_blocks = 0;
  const std::byte* shared = nullptr;  ///< memory of the block
  std::size_t shared_bytes = 0;
  bool perturbed = false;  ///< a seeded schedule: interleave() does something
  bool acquired = false;   ///< since it met others or fenced: its bulk copies need a proxy fence
  // For ThreadSanitizer, which does not know fences: see atomic_memory.hpp.
  bool fenced = false;
  const void* relaxed_loads[16] = {};  ///< the last ones
  unsigned next_relaxed_load = 0;

  void note_relaxed_load(const void* p) { relaxed_loads[next_relaxed_load++ % 16] = p; }
};

/// The running thread of a kernel; null in ordinary code. Fibers stay on one worker, so an ordinary thread_local is
/// enough. Default visibility: kernels in a test program and the machine in a shared library mean the same variable.
[[gnu::visibility("default")]] inline constinit thread_local ThreadState* current_thread = nullptr;

inline void interleave() {
  if (current_thread != nullptr && current_thread->perturbed) current_thread->machine->interleave();
}

}  // namespace deep_ep::host_machine
