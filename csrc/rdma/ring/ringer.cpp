#include "csrc/rdma/ring/ringer.hpp"

#include <memory>

#include "csrc/memory/executor_memory.hpp"

namespace deep_ep::rdma {
namespace {

constexpr std::size_t kPage = 65536;  ///< the largest of a host

/// Earlier stores come before this one, also for a device; and the device gets it at once, not when a write-combining
/// buffer is full.
void store_to_device(volatile std::uint64_t* reg, std::uint64_t word) {
#if defined(__aarch64__)
  asm volatile("dsb sy" ::: "memory");
  __atomic_store_n(reg, word, __ATOMIC_RELEASE);
  asm volatile("dsb sy" ::: "memory");
#elif defined(__x86_64__)
  asm volatile("sfence" ::: "memory");
  __atomic_store_n(reg, word, __ATOMIC_RELEASE);
  asm volatile("sfence" ::: "memory");
#else
#error "no order of stores to devices is known for this processor"
#endif
}

}  // namespace

Ringer::Ringer(const std::shared_ptr<Executor>& executor, std::size_t rings)
    : rings_(rings),
      memory_(pinned_memory<std::byte>(executor, record_bytes() + rings * sizeof(std::uint64_t) + kPage)) {
  void* begin = memory_.get();
  std::size_t room = record_bytes() + kPage;
  records_ = static_cast<std::uint32_t*>(std::align(kPage, record_bytes(), begin, room));
  indices_ = reinterpret_cast<std::uint64_t*>(records_ + record_bytes() / sizeof(std::uint32_t));
}

std::size_t Ringer::record_bytes() const {
  const std::size_t bytes = rings_.size() * 2 * sizeof(std::uint32_t);
  return (bytes + kPage - 1) / kPage * kPage;
}

void Ringer::connect(std::size_t ring, RdmaQueuePair& pair, volatile std::uint64_t* reg) {
  rings_.at(ring) = {reg, pair.number};
  pair.doorbell = indices_ + ring;
}

bool Ringer::step() {
  bool worked = false;
  for (std::size_t i = 0; i < rings_.size(); ++i) {
    Ring& ring = rings_[i];
    const std::uint64_t index = __atomic_load_n(indices_ + i, __ATOMIC_ACQUIRE);
    if (index == ring.rung) continue;
    __atomic_store_n(record(i), device::rdma::record_word(index), __ATOMIC_RELEASE);
    store_to_device(ring.reg, device::rdma::doorbell_word(index, ring.number));
    ring.rung = index;
    worked = true;
  }
  return worked;
}

}  // namespace deep_ep::rdma
