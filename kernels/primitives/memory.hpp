// Loads, stores and atomics with a stated order and scope. Flags and counters go through the first half, rows and other
// payload through the second. On the host all scopes order alike, and the wider two refuse shared memory, as GPUs do.
#pragma once

#include <cstring>
#include <type_traits>

#include "kernels/primitives/target.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device {

/// Who may be on the other side: a thread of this block (words in shared or global memory), of this GPU, or of any
/// processor that maps the memory (the last two: global memory only).
enum class Scope { block, gpu, system };

namespace detail {
template <class T>
concept Word = std::is_integral_v<T> &&(sizeof(T) == 4 || sizeof(T) == 8);
template <class T>
concept Payload = std::is_trivially_copyable_v<T> &&(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
}  // namespace detail

// ---- Flags and counters: integers of 4 or 8 bytes, aligned ----
//
// Each target has its own half of these functions. Each order is named once, here: nothing is weaker on the GPU than on
// the host, and what ThreadSanitizer and mutations show there holds here.

/// Whoever reads a value by this sees everything that its writer wrote before releasing it.
template <Scope S, detail::Word T>
DEEP_EP_DEVICE T load_acquire(const T* p);

/// Never torn, orders nothing.
template <Scope S, detail::Word T>
DEEP_EP_DEVICE T load_relaxed(const T* p);

/// What this thread wrote before (and what it acquired or was synchronised with) is visible to whoever acquires the
/// value.
template <Scope S, detail::Word T>
DEEP_EP_DEVICE void store_release(T* p, std::type_identity_t<T> value);

/// Never torn, orders nothing.
template <Scope S, detail::Word T>
DEEP_EP_DEVICE void store_relaxed(T* p, std::type_identity_t<T> value);

/// Adds, returns the value before; orders nothing.
template <Scope S, detail::Word T>
DEEP_EP_DEVICE T fetch_add_relaxed(T* p, std::type_identity_t<T> value);

/// Adds, returns the value before; releases as add_release does and acquires what the value before released.
template <Scope S, detail::Word T>
DEEP_EP_DEVICE T fetch_add_acq_rel(T* p, std::type_identity_t<T> value);

/// Stores `desired` if the word is `expected`; returns the value before. Releases and acquires like fetch_add_acq_rel.
template <Scope S, detail::Word T>
DEEP_EP_DEVICE T compare_exchange(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> desired);

/// fetch_add_relaxed for those who do not need the value before (the GPU does not wait for it).
template <Scope S, detail::Word T>
DEEP_EP_DEVICE void add_relaxed(T* p, std::type_identity_t<T> value);

/// Adds; what was written before is visible to whoever acquires the sum or a later one.
template <Scope S, detail::Word T>
DEEP_EP_DEVICE void add_release(T* p, std::type_identity_t<T> value);

/// Makes relaxed stores after it release, and relaxed loads before it acquire.
template <Scope S>
DEEP_EP_DEVICE void fence();

// ---- Payload: 4, 8 or 16 bytes, aligned. No order of its own: it is ordered by flags and barriers around it ----

/// Local global memory that nobody writes while the kernel runs; read once. Never for what a peer writes.
template <detail::Payload T>
DEEP_EP_DEVICE T load_stream(const T* p);

/// Global memory that others, peers too, write before a flag that this thread acquired.
template <detail::Payload T>
DEEP_EP_DEVICE T load_weak(const T* p);

/// Global memory, a peer's too, that this block does not read again soon.
template <detail::Payload T>
DEEP_EP_DEVICE void store_stream(T* p, const std::type_identity_t<T>& value);

}  // namespace deep_ep::device

#if DEEP_EP_TARGET_CUDA
#include "kernels/primitives/cuda/ptx_memory.hpp"
#else
#include "kernels/primitives/host/atomic_memory.hpp"
#endif

namespace deep_ep::device {

/// fetch_add_relaxed<Scope::gpu>(p, 1) for a lane that looks at the value later. An addition of a constant the GPU's
/// compiler turns into one of all lanes that add, whose result it waits for at once, to share it out.
DEEP_EP_DEVICE std::uint32_t count_up(std::uint32_t* p) {
#if DEEP_EP_TARGET_CUDA
  return ptx::increment(p);
#else
  return fetch_add_relaxed<Scope::gpu>(p, std::uint32_t{1});
#endif
}

/// One 8-byte store to a device register that is mapped into this GPU; never split, merged or repeated. Orders nothing:
/// put a fence before it, at the scope of whatever reads what the doorbell announces.
DEEP_EP_DEVICE void store_doorbell(std::uint64_t* reg, std::uint64_t value) {
#if DEEP_EP_TARGET_CUDA
  asm volatile("st.mmio.relaxed.sys.global.u64 [%0], %1;" ::"l"(reg), "l"(value) : "memory");
#else
  host_machine::store(reg, value, __ATOMIC_RELAXED);
#endif
}

// ---- Time ----

/// Nanoseconds of a clock that all threads of a kernel share.
DEEP_EP_DEVICE std::uint64_t now_ns() {
#if DEEP_EP_TARGET_CUDA
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
#else
  return host_machine::now_ns();
#endif
}

/// Clock cycles of this SM; nanoseconds on the host.
DEEP_EP_DEVICE std::int64_t clock_cycles() {
#if DEEP_EP_TARGET_CUDA
  std::int64_t now;
  asm volatile("mov.u64 %0, %clock64;" : "=l"(now));
  return now;
#else
  return static_cast<std::int64_t>(host_machine::now_ns());
#endif
}

/// So many polls of a waiting loop come between two looks at what else there is to see, the clock for instance, which
/// costs more than a poll. On the host, where a poll may be milliseconds behind the one before, fewer.
inline constexpr int kPollsToLook = DEEP_EP_TARGET_CUDA ? 64 : 8;

/// Call in every polling loop, with the number of polls so far: gives the processor to those who are waited for.
DEEP_EP_DEVICE void pause(int spins) {
#if DEEP_EP_TARGET_CUDA
  // Short waits are what latency consists of; only long ones leave memory bandwidth to the others.
  if (spins > 1024) asm volatile("nanosleep.u32 100;");
#else
  host_machine::current_thread->machine->pause(spins);
#endif
}

}  // namespace deep_ep::device
