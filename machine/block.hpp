// A block of a kernel: its threads, their scheduler, and everything they share. Lives on one worker from its first
// instruction to its last, so nothing here is locked or atomic.
#pragma once

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "machine/fiber.hpp"
#include "machine/kernel.hpp"
#include "machine/random.hpp"
#include "machine/shared_memory.hpp"
#include "machine/warp.hpp"

namespace deep_ep::host_machine {

class Block final : public Machine {
 public:
  enum class Slice { idle, progressed, finished };  ///< idle: every thread that could run only polled

  Block(std::shared_ptr<Kernel> kernel, int index, FiberPool& fibers);
  ~Block() override;

  /// Called by the worker, on its own stack: runs threads until all of them poll, wait, or have had their fair share.
  Slice run(Context& worker);

  /// The life of one kernel thread, on its fiber. Does not return.
  [[noreturn]] void run_thread(Fiber& fiber);

  void pause(int spins) override;
  void interleave() override;
  void warp_sync() override;
  const std::byte* warp_exchange(const char* op, const void* value, int bytes) override;
  bool block_sync(bool good) override;
  void mbarrier_init(std::uint64_t& word) override;
  void mbarrier_fence_init() override;
  void mbarrier_arrive(std::uint64_t& word, std::uint32_t expected_bytes) override;
  void mbarrier_wait(std::uint64_t& word, std::uint32_t parity) override;
  void bulk_load(void* shared, const void* global, std::uint32_t bytes, std::uint64_t& mbarrier) override;
  void bulk_store(void* global, const void* shared, std::uint32_t bytes) override;
  void bulk_commit() override;
  void bulk_wait(int groups_left, bool reads_alone) override;
  void bulk_fence_global() override;

 private:
  // Scheduling: block.cpp.
  Fiber* next();
  void maybe_interleave(std::uint32_t switches = 8);
  void go_on(Context& from, Fiber* thread, bool final = false);
  void suspend();
  void yield();
  void park(Gathering& at);
  void wake(Gathering& at);
  void progress();
  void count_meeting();
  void abort();
  void finish();
  std::string describe_deadlock() const;
  Warp& current_warp();

  // Meeting points: block_sync.cpp.
  void release(MeetingPoint& point);
  void arrive(Gathering& at);
  void advance(Gathering& at);
  std::string awaited(const Gathering& at) const;
  template <class Come>
  void meet_in_order(Gathering& at, Come come);
  const std::byte* meet(const char* op, const void* value, int bytes);
  void run_loads(MbarrierState& state, bool all);
  void end_phase(MbarrierState& state);
  MbarrierState& mbarrier_at(const std::uint64_t& word, std::uint64_t ticket);
  std::string describe(const MbarrierState& state) const;
  std::string unfinished_mbarriers() const;

  // Bulk copies: block_bulk.cpp.
  void check_copy(const char* what, const void* shared, const void* global, std::uint32_t bytes) const;
  void execute(const BulkLoad& load);
  void finish_copies(Fiber& fiber);
  void read(const Fiber& fiber, BulkStore& store);
  void write_first(Fiber& fiber, std::size_t stores);

  std::shared_ptr<Kernel> kernel_;
  int index_;
  FiberPool& pool_;
  Random random_;
  SharedMemory shared_;
  std::deque<MbarrierState> mbarriers_;         ///< references stay valid; never reused, so stale tickets are detected
  std::vector<std::unique_ptr<Fiber>> fibers_;  ///< by thread index
  std::vector<Warp> warps_;
  Barrier barrier_;
  std::deque<Fiber*> ready_;  ///< threads that can run: first in, first out; a seeded schedule draws

  Context* worker_ = nullptr;
  void* worker_tsan_context_ = nullptr;
  Fiber* current_ = nullptr;
  std::uint64_t acquires_ = 0;  ///< that threads knew of when they met
  int live_ = 0;
  std::size_t quiet_ = 0;  ///< threads in a row that did nothing but poll
  int budget_ = 0;         ///< switches left in this slice
  bool progressed_ = false;
  bool aborting_ = false;
};

}  // namespace deep_ep::host_machine
