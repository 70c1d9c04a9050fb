// The threads of a block start bulk copies and wait for them. The copies are done as late as the program allows, or,
// under a seed, earlier.
#include <algorithm>
#include <cstring>

#include "csrc/support/format.hpp"
#include "machine/block.hpp"

namespace deep_ep::host_machine {

/// Arguments as the GPU demands them, behind a fence; throws otherwise.
void Block::check_copy(const char* what, const void* shared, const void* global, std::uint32_t bytes) const {
  const auto misaligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 != 0; };
  if (bytes == 0 || bytes % 16 != 0) fail<Error>("{} of {} bytes; allowed: multiples of 16, not zero", what, bytes);
  if (!shared_.contains(shared, bytes)) {
    fail<Error>("{} of {} bytes at {}, which is not inside the block's shared memory", what, bytes,
                shared_.name(shared));
  }
  if (misaligned(shared)) fail<Error>("{}: {} is not aligned to 16 bytes", what, shared_.name(shared));
  if (misaligned(global)) fail<Error>("{}: global address {} is not aligned to 16 bytes", what, global);
  if (current_->state.acquired || current_->past.acquired > current_->past.fenced) {
    fail<Error>(
        "{} without bulk::fence_global behind a signal that this thread, or one that it has met, has acquired: the "
        "copy may come before what the signal stands for",
        what);
  }
}

// ThreadSanitizer sees the engine's accesses as the issuing thread's: they come after what that thread did or acquired
// before, and before the threads that it synchronises with later.

void Block::bulk_load(void* shared, const void* global, std::uint32_t bytes, std::uint64_t& mbarrier) {
  const std::uint64_t ticket = mbarrier;
  const tsan::Scope as_worker(worker_tsan_context_);
  maybe_interleave();
  check_copy("bulk::load", shared, global, bytes);
  MbarrierState& state = mbarrier_at(mbarrier, ticket);
  if (!state.fenced)
    fail<Error>("bulk::load with a barrier that mbarrier::fence_init has not made known: {}", describe(state));
  state.loads.push_back({current_, static_cast<std::byte*>(shared), static_cast<const std::byte*>(global), bytes});
  if (random_.chance(4)) run_loads(state, /*all=*/false);
  progress();
  // A thread that waits already does the load when its turn comes.
  wake(state);
}

/// Does the copy now.
void Block::execute(const BulkLoad& load) {
  // Looked up before the context changes: `load` may lie on the stack, where a kernel thread had a variable before.
  const auto [issuer, shared, global, bytes] = load;
  {
    const tsan::Scope as_issuer(issuer->tsan_context);
    std::memcpy(shared, global, bytes);
  }
  std::memcpy(shared_.shadow_of(shared), shared, bytes);
}

void Block::bulk_store(void* global, const void* shared, std::uint32_t bytes) {
  const tsan::Scope as_worker(worker_tsan_context_);
  maybe_interleave();
  check_copy("bulk::store", shared, global, bytes);
  BulkStores& copies = current_->copies;
  copies.stores.push_back({.global = static_cast<std::byte*>(global),
                           .shared = static_cast<const std::byte*>(shared),
                           .bytes = bytes,
                           .group = copies.open_group});
  if (random_.chance(4)) read(*current_, copies.stores.back());
  if (random_.chance(8)) write_first(*current_, copies.stores.size());
}

void Block::bulk_commit() {
  const tsan::Scope as_worker(worker_tsan_context_);
  ++current_->copies.open_group;
}

/// Only now is the source of all but the latest `groups_left` committed groups read: a late reader sees what came into
/// a stage that was reused too early. If they are complete, their bytes are on their way to memory. They get there at
/// the fence, or when the kernel ends.
void Block::bulk_wait(int groups_left, bool reads_alone) {
  const tsan::Scope as_worker(worker_tsan_context_);
  maybe_interleave();
  BulkStores& copies = current_->copies;
  std::size_t count = 0;
  for (; count < copies.stores.size(); ++count) {
    BulkStore& store = copies.stores[count];
    if (store.group + static_cast<std::uint64_t>(groups_left) >= copies.open_group) break;
    store.waited = true;
    read(*current_, store);
  }
  if (!reads_alone) copies.complete = std::max(copies.complete, count);
  const auto all = static_cast<std::uint32_t>(copies.stores.size());
  if (random_.chance(reads_alone ? 4 : 2))
    write_first(*current_, reads_alone ? random_.below(all + 1) : copies.complete);
}

void Block::bulk_fence_global() {
  const tsan::Scope as_worker(worker_tsan_context_);
  maybe_interleave();
  BulkStores& copies = current_->copies;
  write_first(*current_, copies.complete);
  copies.stores.erase(copies.stores.begin(), copies.stores.begin() + static_cast<std::ptrdiff_t>(copies.complete));
  copies.written -= copies.complete;
  copies.complete = 0;
  current_->state.acquired = false;
  current_->past.fenced = current_->past.acquired;
}

/// The thread ends: stores whose source was not waited for are an error, the others are completed.
void Block::finish_copies(Fiber& fiber) {
  const std::vector<BulkStore>& stores = fiber.copies.stores;
  const auto unread = std::ranges::count(stores, false, &BulkStore::waited);
  if (unread > 0) {
    fail<Error>(
        "the thread exits while {} of its bulk stores still read shared memory (the last at {}): "
        "bulk::commit and bulk::wait_read or bulk::wait are missing",
        unread, shared_.name(stores.back().shared));
  }
  write_first(fiber, stores.size());  // the end of a kernel makes them visible
}

void Block::read(const Fiber& fiber, BulkStore& store) {
  if (!store.buffer.empty()) return;
  const std::byte* source = shared_.shadow_of(store.shared);
  store.buffer.assign(source, source + store.bytes);
  const tsan::Scope as_issuer(fiber.tsan_context);
  tsan::read(store.shared, store.bytes);
}

/// The engine writes in the order of issue.
void Block::write_first(Fiber& fiber, std::size_t stores) {
  for (std::size_t& written = fiber.copies.written; written < stores; ++written) {
    BulkStore& store = fiber.copies.stores[written];
    read(fiber, store);
    const tsan::Scope as_issuer(fiber.tsan_context);
    std::memcpy(store.global, store.buffer.data(), store.bytes);
  }
}

}  // namespace deep_ep::host_machine
