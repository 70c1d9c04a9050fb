#include "machine/bulk_engine.hpp"

#include <cstring>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::host_machine {

void BulkEngine::check(const char* what, const void* shared, const void* global, std::uint32_t bytes) const {
  const auto misaligned = [](const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 16 != 0; };
  if (bytes == 0 || bytes % 16 != 0) fail<Error>("{} of {} bytes; allowed: multiples of 16, not zero", what, bytes);
  if (!shared_.contains(shared, bytes)) {
    fail<Error>("{} of {} bytes at {}, which is not inside the block's shared memory", what, bytes,
                shared_.name(shared));
  }
  if (misaligned(shared)) fail<Error>("{}: {} is not aligned to 16 bytes", what, shared_.name(shared));
  if (misaligned(global)) fail<Error>("{}: global address {} is not aligned to 16 bytes", what, global);
}

// ThreadSanitizer sees the engine's accesses as the issuing thread's: they come after what that thread did or acquired
// before, and before the threads that it synchronises with later.

void BulkEngine::execute(const BulkLoad& load) {
  {
    const tsan::Scope as_issuer(load.issuer->tsan_context);
    std::memcpy(load.shared, load.global, load.bytes);
  }
  std::memcpy(shared_.shadow_of(load.shared), load.shared, load.bytes);
}

void BulkEngine::store(Fiber& fiber, std::byte* global, const std::byte* shared, std::uint32_t bytes) {
  Thread& t = thread(fiber);
  t.stores.push_back({global, shared, bytes, t.open_group, false, false, {}});
  if (random_.chance(4)) read(fiber, t.stores.back());
  if (random_.chance(8)) write_first(fiber, t.stores.size());
}

void BulkEngine::wait_read(Fiber& fiber, int groups_left) {
  Thread& t = thread(fiber);
  for (Store& store : t.stores) {
    if (store.group + static_cast<std::uint64_t>(groups_left) >= t.open_group) break;
    store.waited = true;
    read(fiber, store);
  }
  if (random_.chance(4)) write_first(fiber, random_.below(static_cast<std::uint32_t>(t.stores.size()) + 1));
}

void BulkEngine::wait(Fiber& fiber, int groups_left) {
  Thread& t = thread(fiber);
  for (; t.complete < t.stores.size(); ++t.complete) {
    Store& store = t.stores[t.complete];
    if (store.group + static_cast<std::uint64_t>(groups_left) >= t.open_group) break;
    store.waited = true;
    read(fiber, store);
  }
  if (random_.chance(2)) write_first(fiber, t.complete);
}

void BulkEngine::fence(Fiber& fiber) {
  Thread& t = thread(fiber);
  write_first(fiber, t.complete);
  t.stores.erase(t.stores.begin(), t.stores.begin() + static_cast<std::ptrdiff_t>(t.complete));
  t.written -= t.complete;
  t.complete = 0;
}

void BulkEngine::finish(Fiber& fiber) {
  Thread& t = thread(fiber);
  std::size_t unread = 0;
  for (const Store& store : t.stores) unread += store.waited ? 0 : 1;
  if (unread > 0) {
    fail<Error>(
        "the thread exits while {} of its bulk stores still read shared memory (the last at {}): "
        "bulk::commit and bulk::wait_read or bulk::wait are missing",
        unread, shared_.name(t.stores.back().shared));
  }
  write_first(fiber, t.stores.size());  // the end of a kernel makes them visible
  t = {};
}

void BulkEngine::read(Fiber& fiber, Store& store) {
  if (store.read) return;
  const std::byte* source = shared_.shadow_of(store.shared);
  store.buffer.assign(source, source + store.bytes);
  store.read = true;
  const tsan::Scope as_issuer(fiber.tsan_context);
  tsan::read(store.shared, store.bytes);
}

/// The engine writes in the order of issue.
void BulkEngine::write_first(Fiber& fiber, std::size_t stores) {
  Thread& t = thread(fiber);
  for (; t.written < stores; ++t.written) write(fiber, t.stores[t.written]);
}

void BulkEngine::write(Fiber& fiber, Store& store) {
  read(fiber, store);
  {
    const tsan::Scope as_issuer(fiber.tsan_context);
    std::memcpy(store.global, store.buffer.data(), store.bytes);
  }
  store.buffer = {};
}

}  // namespace deep_ep::host_machine
