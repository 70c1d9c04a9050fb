// The functions of memory.hpp on the host: C++ atomics on plain words. All scopes are one.
#pragma once

#include <atomic>
#include <chrono>
#include <string>

#include "deep_ep/error.hpp"
#include "kernels/primitives/host/machine.hpp"
#include "kernels/primitives/target.hpp"

#if DEEP_EP_TSAN
extern "C" void __tsan_acquire(void*);
extern "C" void __tsan_release(void*);
#endif

namespace deep_ep::host_machine {

// ThreadSanitizer does not know fences. For it, a thread that has fenced makes its relaxed stores release, a fence
// acquires what the thread's last relaxed loads read, and all fences meet in one point. That never reports a correct
// program; it may miss a race of a program that fences.

inline bool releases(int order) {
  return order == __ATOMIC_RELEASE ||
         (DEEP_EP_TSAN && order == __ATOMIC_RELAXED && current_thread != nullptr && current_thread->fenced);
}
inline void note_load(const void* p, int order) {
  if (DEEP_EP_TSAN && order == __ATOMIC_RELAXED && current_thread != nullptr) current_thread->note_relaxed_load(p);
}
inline void fence() {
#if DEEP_EP_TSAN
  static char fence_point;
  if (current_thread != nullptr) {
    current_thread->fenced = true;
    for (const void* p : current_thread->relaxed_loads) {
      if (p != nullptr) __tsan_acquire(const_cast<void*>(p));
    }
  }
  __tsan_acquire(&fence_point);
  __tsan_release(&fence_point);
#else
  std::atomic_thread_fence(std::memory_order_acq_rel);
#endif
}

/// Bulk copies that come after an acquire need a proxy fence behind it.
inline void note_acquire() {
  if (current_thread != nullptr) current_thread->acquired = true;
}

// A perturbed schedule may switch to another thread at every flag, where the order is decided.

template <class T>
T load(const T* p, int order) {
  interleave();
  note_load(p, order);
  // Constants, because the builtins take nothing else without falling back to the strongest order.
  if (order != __ATOMIC_ACQUIRE) return __atomic_load_n(p, __ATOMIC_RELAXED);
  note_acquire();
  return __atomic_load_n(p, __ATOMIC_ACQUIRE);
}

template <class T>
void store(T* p, T value, int order) {
  interleave();
  if (releases(order)) {
    __atomic_store_n(p, value, __ATOMIC_RELEASE);
  } else {
    __atomic_store_n(p, value, __ATOMIC_RELAXED);
  }
  interleave();
}

template <class T>
T fetch_add(T* p, T value, int order) {
  interleave();
  if (order == __ATOMIC_ACQ_REL) note_acquire();
  const T old = order == __ATOMIC_ACQ_REL ? __atomic_fetch_add(p, value, __ATOMIC_ACQ_REL)
                : releases(order)         ? __atomic_fetch_add(p, value, __ATOMIC_RELEASE)
                                          : __atomic_fetch_add(p, value, __ATOMIC_RELAXED);
  note_load(p, order);
  interleave();
  return old;
}

/// On a GPU wider scopes than a block's name global memory.
template <device::Scope S>
void check_space(const void* p) {
  if (S == device::Scope::block || current_thread == nullptr) return;
  const auto offset = reinterpret_cast<std::uintptr_t>(p) - reinterpret_cast<std::uintptr_t>(current_thread->shared);
  if (offset >= current_thread->shared_bytes) return;
  throw Error("an access at gpu or system scope to shared+" + std::to_string(offset) +
              "; allowed: global memory, at block scope also shared memory");
}

}  // namespace deep_ep::host_machine

#define DEEP_EP_WORD_LOAD(NAME, PTX_ORDER, ORDER) \
  template <Scope S, detail::Word T>              \
  T NAME(const T* p) {                            \
    host_machine::check_space<S>(p);              \
    return host_machine::load(p, ORDER);          \
  }
#define DEEP_EP_WORD_WRITE(NAME, PTX_OPERATION, PTX_BEFORE_TYPE, OPERATION, ORDER) \
  template <Scope S, detail::Word T>                                               \
  void NAME(T* p, std::type_identity_t<T> value) {                                 \
    host_machine::check_space<S>(p);                                               \
    host_machine::OPERATION(p, value, ORDER);                                      \
  }
#define DEEP_EP_WORD_FETCH_ADD(NAME, PTX_ORDER, ORDER) \
  template <Scope S, detail::Word T>                   \
  T NAME(T* p, std::type_identity_t<T> value) {        \
    host_machine::check_space<S>(p);                   \
    return host_machine::fetch_add(p, value, ORDER);   \
  }
#define DEEP_EP_PAYLOAD_LOAD(NAME, PTX) \
  template <detail::Payload T>          \
  T NAME(const T* p) {                  \
    return *p;                          \
  }
