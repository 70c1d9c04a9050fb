// What memory.hpp means on the host: C++ atomics on plain words. All scopes are one.
#pragma once

#include <time.h>

#include <atomic>

#include "kernels/primitives/host/machine.hpp"
#include "kernels/primitives/target.hpp"

#if DEEP_EP_TSAN
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
#endif

namespace deep_ep::host_machine {

// A perturbed schedule may switch to another thread beside every flag, where orders are decided.

template <class T>
T load(const T* p, int order) {
  interleave();
  // Constants, because the builtins take nothing else without falling back to the strongest order.
  return order == __ATOMIC_ACQUIRE ? __atomic_load_n(p, __ATOMIC_ACQUIRE) : __atomic_load_n(p, __ATOMIC_RELAXED);
}

template <class T>
void store(T* p, T value, int order) {
  interleave();
  order == __ATOMIC_RELEASE ? __atomic_store_n(p, value, __ATOMIC_RELEASE) : __atomic_store_n(p, value, __ATOMIC_RELAXED);
  interleave();
}

template <class T>
T fetch_add(T* p, T value, int order) {
  interleave();
  T old;
  switch (order) {
    case __ATOMIC_RELAXED: old = __atomic_fetch_add(p, value, __ATOMIC_RELAXED); break;
    case __ATOMIC_RELEASE: old = __atomic_fetch_add(p, value, __ATOMIC_RELEASE); break;
    default: old = __atomic_fetch_add(p, value, __ATOMIC_ACQ_REL); break;
  }
  interleave();
  return old;
}

#if DEEP_EP_TSAN
// ThreadSanitizer does not know fences. One common point for all of them never reports a correct program; it may miss
// a race between two threads that both fence.
inline char fence_point;
#endif

inline void fence() {
#if DEEP_EP_TSAN
  __tsan_acquire(&fence_point);
  __tsan_release(&fence_point);
#else
  std::atomic_thread_fence(std::memory_order_acq_rel);
#endif
}

inline std::uint64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<std::uint64_t>(now.tv_sec) * 1000000000u + static_cast<std::uint64_t>(now.tv_nsec);
}

}  // namespace deep_ep::host_machine
