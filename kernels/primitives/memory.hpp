// Loads, stores and atomics with a stated order and scope. Flags and counters go through the first half, rows and other
// payload through the second. On the host all scopes order alike, and the wider two refuse shared memory, as GPUs do.
#pragma once

#include <cstring>
#include <type_traits>

#include "kernels/primitives/target.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device {

/// The other side: a thread of this block (words in shared or global memory), of this GPU, or of any
/// processor that maps the memory (the last two: global memory only).
enum class Scope { block, gpu, system };

namespace detail {
template <class T>
concept Word = std::is_integral_v<T> &&(sizeof(T) == 4 || sizeof(T) == 8);
template <class T>
concept Payload = std::is_trivially_copyable_v<T> &&(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);
}  // namespace detail
}  // namespace deep_ep::device

// Each target has its own half: macros that make these functions, each of which is named once, here, with its order.
// Nothing but cells (cell.hpp) is weaker on the GPU than on the host, and what ThreadSanitizer and mutations show there
// holds here.
#if DEEP_EP_TARGET_CUDA
#include "kernels/primitives/cuda/ptx_memory.hpp"
#else
#include "kernels/primitives/host/atomic_memory.hpp"
#endif

namespace deep_ep::device {

// ---- Flags and counters: integers of 4 or 8 bytes, aligned ----

/// A thread that reads a value by load_acquire<S>(p) sees everything that its writer wrote before releasing it. A
/// relaxed load is never torn, and orders nothing.
DEEP_EP_WORD_LOAD(load_acquire, "acquire", __ATOMIC_ACQUIRE)
DEEP_EP_WORD_LOAD(load_relaxed, "relaxed", __ATOMIC_RELAXED)

/// After store_release<S>(p, value), what this thread wrote before (and what it acquired or was synchronised with) is
/// visible to whoever acquires the value. A relaxed store is never torn, and orders nothing.
DEEP_EP_WORD_WRITE(store_release, "st.release", ".", store, __ATOMIC_RELEASE)
DEEP_EP_WORD_WRITE(store_relaxed, "st.relaxed", ".", store, __ATOMIC_RELAXED)

/// fetch_add_...<S>(p, value) returns the value before. acq_rel releases as add_release does and acquires what the
/// value before released.
DEEP_EP_WORD_FETCH_ADD(fetch_add_relaxed, "relaxed", __ATOMIC_RELAXED)
DEEP_EP_WORD_FETCH_ADD(fetch_add_acq_rel, "acq_rel", __ATOMIC_ACQ_REL)

/// For those who do not need the value before (the GPU does not wait for it). Behind add_release<S>(p, value) what was
/// written before is visible to whoever acquires the sum or a later one.
DEEP_EP_WORD_WRITE(add_relaxed, "red.relaxed", ".add.", fetch_add, __ATOMIC_RELAXED)
DEEP_EP_WORD_WRITE(add_release, "red.release", ".add.", fetch_add, __ATOMIC_RELEASE)

/// Stores `desired` if the word is `expected`; returns the value before. Releases and acquires like fetch_add_acq_rel.
template <Scope S>
DEEP_EP_DEVICE std::uint64_t compare_exchange(std::uint64_t* p, std::uint64_t expected, std::uint64_t desired) {
#if DEEP_EP_TARGET_CUDA
  std::uint64_t old;
  DEEP_EP_PTX_BY_SCOPE("atom.acq_rel", ".cas.b64 %0, [%1], %2, %3;", : "=l"(old) : "l"(p), "l"(expected), "l"(desired))
  return old;
#else
  host_machine::check_space<S>(p);
  host_machine::interleave();
  host_machine::note_acquire();
  __atomic_compare_exchange_n(p, &expected, desired, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
  host_machine::interleave();
  return expected;
#endif
}

/// Makes relaxed stores after it release, and relaxed loads before it acquire.
template <Scope S>
DEEP_EP_DEVICE void fence() {
#if DEEP_EP_TARGET_CUDA
  if constexpr (S == Scope::block) asm volatile("fence.acq_rel.cta;" ::: "memory");
  if constexpr (S == Scope::gpu) asm volatile("fence.acq_rel.gpu;" ::: "memory");
  if constexpr (S == Scope::system) asm volatile("fence.acq_rel.sys;" ::: "memory");
#else
  host_machine::fence();
#endif
}

// ---- Payload: 4, 8 or 16 bytes, aligned. No order of its own: it is ordered by flags and barriers around it ----

/// load_stream(p): local global memory that nobody writes while the kernel runs; read once. Never for what a peer
/// writes.
DEEP_EP_PAYLOAD_LOAD(load_stream, "ld.global.nc.L1::no_allocate")
/// load_weak(p): global memory that others, peers too, write before a flag that this thread acquired.
DEEP_EP_PAYLOAD_LOAD(load_weak, "ld.global")

/// Global memory, a peer's too, that this block does not read again soon: 8 or 16 bytes.
template <detail::Payload T>
DEEP_EP_DEVICE void store_stream(T* p, const std::type_identity_t<T>& value) {
  static_assert(sizeof(T) >= 8);
#if DEEP_EP_TARGET_CUDA
  std::uint32_t word[sizeof(T) / 4];
  memcpy(word, &value, sizeof(T));
  if constexpr (sizeof(T) == 8)
    asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(word[0]), "r"(word[1]) : "memory");
  if constexpr (sizeof(T) == 16)
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(word[0]), "r"(word[1]),
                 "r"(word[2]), "r"(word[3])
                 : "memory");
#else
  *p = value;
#endif
}

#undef DEEP_EP_WORD_LOAD
#undef DEEP_EP_WORD_WRITE
#undef DEEP_EP_WORD_FETCH_ADD
#undef DEEP_EP_PAYLOAD_LOAD
#undef DEEP_EP_PTX_BY_SCOPE

/// fetch_add_relaxed<Scope::gpu>(p, 1) for a lane that looks at the value later. An addition of a constant the GPU's
/// compiler turns into one of all lanes that add, whose result it waits for at once, to share it out.
DEEP_EP_DEVICE std::uint32_t count_up(std::uint32_t* p) {
#if DEEP_EP_TARGET_CUDA
  std::uint32_t old;  // counts up to 2^31 - 1: without this end the compiler would take it for an addition
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(0x7fffffffu) : "memory");
  return old;
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

/// Nanoseconds of a clock that all threads of a kernel share.
DEEP_EP_DEVICE std::uint64_t now_ns() {
#if DEEP_EP_TARGET_CUDA
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
#else
  return static_cast<std::uint64_t>(std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1));
#endif
}

/// Clock cycles of this SM; nanoseconds on the host.
DEEP_EP_DEVICE std::int64_t clock_cycles() {
#if DEEP_EP_TARGET_CUDA
  return clock64();
#else
  return static_cast<std::int64_t>(now_ns());
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
