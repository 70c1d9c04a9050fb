// The threads of a block start copies and wait for them.
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"
#include "machine/block.hpp"

namespace deep_ep::host_machine {

void Block::check_copy(const char* what, const void* shared, const void* global, std::uint32_t bytes) {
  bulk_.check(what, shared, global, bytes);
  if (!proxies_.is_fenced(*current_)) {
    fail<Error>(
        "{} without bulk::fence_global behind a signal that this thread, or one that it has met, has acquired: the "
        "copy may come before what the signal stands for",
        what);
  }
}

void Block::bulk_load(void* shared, const void* global, std::uint32_t bytes, std::uint64_t& mbarrier) {
  const std::uint64_t ticket = mbarrier;
  const tsan::Scope as_worker(worker_tsan_context_);
  maybe_interleave();
  check_copy("bulk::load", shared, global, bytes);
  MbarrierState& state = mbarriers_.find(mbarrier, ticket);
  if (!state.fenced)
    fail<Error>("bulk::load with a barrier that mbarrier::fence_init has not made known: {}",
                mbarriers_.describe(state));
  state.loads.push_back({current_, static_cast<std::byte*>(shared), static_cast<const std::byte*>(global), bytes});
  if (random_.chance(4)) run_loads(state, /*all=*/false);
  progress();
  // A thread that waits already does the load when its turn comes.
  for (Fiber* fiber : state.waiting) wake(*fiber);
  state.waiting.clear();
}

void Block::bulk_store(void* global, const void* shared, std::uint32_t bytes) {
  const tsan::Scope as_worker(worker_tsan_context_);
  maybe_interleave();
  check_copy("bulk::store", shared, global, bytes);
  bulk_.store(*current_, static_cast<std::byte*>(global), static_cast<const std::byte*>(shared), bytes);
}

void Block::bulk_commit() {
  const tsan::Scope as_worker(worker_tsan_context_);
  bulk_.commit(*current_);
}

void Block::bulk_wait_read(int groups_left) {
  const tsan::Scope as_worker(worker_tsan_context_);
  maybe_interleave();
  bulk_.wait_read(*current_, groups_left);
}

void Block::bulk_wait(int groups_left) {
  const tsan::Scope as_worker(worker_tsan_context_);
  maybe_interleave();
  bulk_.wait(*current_, groups_left);
}

void Block::bulk_fence_global() {
  const tsan::Scope as_worker(worker_tsan_context_);
  maybe_interleave();
  bulk_.fence(*current_);
  proxies_.fence(*current_);
}

void Block::refuse_shared(const void* shared) {
  fail<Error>("an access at gpu or system scope to {}; allowed: global memory, at block scope also shared memory",
              shared_.name(shared));
}

}  // namespace deep_ep::host_machine
