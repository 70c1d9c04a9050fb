#include "csrc/rdma/ring/ringer.hpp"

namespace deep_ep::rdma {
namespace {

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

bool Ringer::step() {
  bool worked = false;
  for (Ring& ring : rings_) {
    const std::uint64_t index = __atomic_load_n(ring.index, __ATOMIC_ACQUIRE);
    if (index == ring.rung) continue;
    __atomic_store_n(ring.record, device::rdma::record_word(index), __ATOMIC_RELEASE);
    store_to_device(ring.reg, device::rdma::doorbell_word(index, ring.number));
    ring.rung = index;
    worked = true;
  }
  return worked;
}

}  // namespace deep_ep::rdma
