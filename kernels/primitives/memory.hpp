// Loads, stores and atomics with a stated order and scope. Flags and counters go through the first half, rows and other
// payload through the second. On the host all scopes are the same.
#pragma once

#include <cstring>
#include <type_traits>

#include "kernels/primitives/target.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device {

/// Who may be on the other side: a thread of this block (words in shared or global memory), of this GPU, or of any
/// processor that maps the memory (the last two: global memory only).
enum class Scope { block, gpu, system };

}  // namespace deep_ep::device

#if DEEP_EP_TARGET_CUDA
#include "kernels/primitives/cuda/ptx_memory.hpp"
#else
#include "kernels/primitives/host/atomic_memory.hpp"
#endif

namespace deep_ep::device {

namespace detail {

template <std::size_t kBytes>
struct Unsigned;
template <>
struct Unsigned<4> {
  using type = std::uint32_t;
};
template <>
struct Unsigned<8> {
  using type = std::uint64_t;
};

/// The unsigned word that stands for an integer of 4 or 8 bytes.
template <class T>
using Word = typename Unsigned<sizeof(T)>::type;

template <class T>
constexpr bool is_payload = std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16);

}  // namespace detail

// ---- Flags and counters: integers of 4 or 8 bytes, aligned ----

/// Whoever reads a value by this sees everything that its writer wrote before releasing it.
template <Scope S, class T>
DEEP_EP_DEVICE T load_acquire(const T* p) {
  using W = detail::Word<T>;
#if DEEP_EP_TARGET_CUDA
  return static_cast<T>(ptx::load_acquire<S>(reinterpret_cast<const W*>(p)));
#else
  return static_cast<T>(host_machine::load(reinterpret_cast<const W*>(p), __ATOMIC_ACQUIRE));
#endif
}

/// Never torn, orders nothing.
template <Scope S, class T>
DEEP_EP_DEVICE T load_relaxed(const T* p) {
  using W = detail::Word<T>;
#if DEEP_EP_TARGET_CUDA
  return static_cast<T>(ptx::load_relaxed<S>(reinterpret_cast<const W*>(p)));
#else
  return static_cast<T>(host_machine::load(reinterpret_cast<const W*>(p), __ATOMIC_RELAXED));
#endif
}

/// A relaxed load that a later fence<S>() turns into an acquire: for several words that are looked at together.
template <Scope S, class T>
DEEP_EP_DEVICE T load_before_fence(const T* p) {
#if DEEP_EP_TARGET_CUDA
  return load_relaxed<S>(p);
#else
  return load_acquire<S>(p);  // ThreadSanitizer knows no fences
#endif
}

/// What this thread wrote before (and what it acquired or was synchronised with) is visible to whoever acquires the
/// value.
template <Scope S, class T>
DEEP_EP_DEVICE void store_release(T* p, std::type_identity_t<T> value) {
  using W = detail::Word<T>;
#if DEEP_EP_TARGET_CUDA
  ptx::store_release<S>(reinterpret_cast<W*>(p), static_cast<W>(value));
#else
  host_machine::store(reinterpret_cast<W*>(p), static_cast<W>(value), __ATOMIC_RELEASE);
#endif
}

namespace detail {
/// For stores that need no fence on the GPU, where something else has ordered them.
template <Scope S, class T>
DEEP_EP_DEVICE void store_ordered_before(T* p, std::type_identity_t<T> value) {
  using W = detail::Word<T>;
#if DEEP_EP_TARGET_CUDA
  ptx::store_relaxed<S>(reinterpret_cast<W*>(p), static_cast<W>(value));
#else
  host_machine::store(reinterpret_cast<W*>(p), static_cast<W>(value), __ATOMIC_RELEASE);
#endif
}
}  // namespace detail

/// Says that an earlier kernel of this stream has ended its reads: whoever acquires the value may overwrite what that
/// kernel read. On the GPU a relaxed store: reads of a kernel that has ended cannot come late, and a fence would wait
/// for the stores of everybody else on the SM.
template <Scope S, class T>
DEEP_EP_DEVICE void store_after_earlier_reads(T* p, std::type_identity_t<T> value) {
  detail::store_ordered_before<S>(p, value);
}

/// Loads what store_after_earlier_reads stored. Only stores may depend on it, through a branch of this thread or of one
/// that it has synced with; later loads may see older memory. On the GPU a relaxed load: stores do not run ahead of a
/// branch, and an acquire takes half a microsecond.
template <Scope S, class T>
DEEP_EP_DEVICE T load_before_overwriting(const T* p) {
#if DEEP_EP_TARGET_CUDA
  return load_relaxed<S>(p);
#else
  return load_acquire<S>(p);
#endif
}

/// A store_release by the last of those who have arrived at a ticket by fetch_add_acq_rel<S>, behind a branch on what
/// the ticket said. On the GPU a relaxed store: each arrival has a barrier of that scope before it, which waits until
/// what came before is where everybody sees it, and stores do not run ahead of a branch.
template <Scope S, class T>
DEEP_EP_DEVICE void store_after_arrivals(T* p, std::type_identity_t<T> value) {
  detail::store_ordered_before<S>(p, value);
}

/// Never torn, orders nothing.
template <Scope S, class T>
DEEP_EP_DEVICE void store_relaxed(T* p, std::type_identity_t<T> value) {
  using W = detail::Word<T>;
#if DEEP_EP_TARGET_CUDA
  ptx::store_relaxed<S>(reinterpret_cast<W*>(p), static_cast<W>(value));
#else
  host_machine::store(reinterpret_cast<W*>(p), static_cast<W>(value), __ATOMIC_RELAXED);
#endif
}

/// Adds, returns the value before; orders nothing.
template <Scope S, class T>
DEEP_EP_DEVICE T fetch_add_relaxed(T* p, std::type_identity_t<T> value) {
  using W = detail::Word<T>;
#if DEEP_EP_TARGET_CUDA
  return static_cast<T>(ptx::fetch_add_relaxed<S>(reinterpret_cast<W*>(p), static_cast<W>(value)));
#else
  return static_cast<T>(host_machine::fetch_add(reinterpret_cast<W*>(p), static_cast<W>(value), __ATOMIC_RELAXED));
#endif
}

/// Adds, returns the value before; what was written before is visible to whoever acquires the sum or a later one.
template <Scope S, class T>
DEEP_EP_DEVICE T fetch_add_release(T* p, std::type_identity_t<T> value) {
  using W = detail::Word<T>;
#if DEEP_EP_TARGET_CUDA
  return static_cast<T>(ptx::fetch_add_release<S>(reinterpret_cast<W*>(p), static_cast<W>(value)));
#else
  return static_cast<T>(host_machine::fetch_add(reinterpret_cast<W*>(p), static_cast<W>(value), __ATOMIC_RELEASE));
#endif
}

/// Adds, returns the value before; releases as fetch_add_release does and acquires what the value before released.
template <Scope S, class T>
DEEP_EP_DEVICE T fetch_add_acq_rel(T* p, std::type_identity_t<T> value) {
  using W = detail::Word<T>;
#if DEEP_EP_TARGET_CUDA
  return static_cast<T>(ptx::fetch_add_acq_rel<S>(reinterpret_cast<W*>(p), static_cast<W>(value)));
#else
  return static_cast<T>(host_machine::fetch_add(reinterpret_cast<W*>(p), static_cast<W>(value), __ATOMIC_ACQ_REL));
#endif
}

/// Stores `desired` if the word is `expected`; returns the value before. Releases and acquires like fetch_add_acq_rel.
template <Scope S, class T>
DEEP_EP_DEVICE T compare_exchange(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> desired) {
  using W = detail::Word<T>;
#if DEEP_EP_TARGET_CUDA
  return static_cast<T>(
      ptx::compare_exchange<S>(reinterpret_cast<W*>(p), static_cast<W>(expected), static_cast<W>(desired)));
#else
  return static_cast<T>(
      host_machine::compare_exchange(reinterpret_cast<W*>(p), static_cast<W>(expected), static_cast<W>(desired)));
#endif
}

/// fetch_add_relaxed for those who do not need the value before (the GPU does not wait for it).
template <Scope S, class T>
DEEP_EP_DEVICE void add_relaxed(T* p, std::type_identity_t<T> value) {
#if DEEP_EP_TARGET_CUDA
  using W = detail::Word<T>;
  ptx::add_relaxed<S>(reinterpret_cast<W*>(p), static_cast<W>(value));
#else
  fetch_add_relaxed<S>(p, value);
#endif
}

/// fetch_add_release for those who do not need the value before.
template <Scope S, class T>
DEEP_EP_DEVICE void add_release(T* p, std::type_identity_t<T> value) {
#if DEEP_EP_TARGET_CUDA
  using W = detail::Word<T>;
  ptx::add_release<S>(reinterpret_cast<W*>(p), static_cast<W>(value));
#else
  fetch_add_release<S>(p, value);
#endif
}

/// Counts what this warp has read, and whose values it has used: whoever acquires the count may overwrite that. On the
/// GPU relaxed, for the reasons of store_after_earlier_reads: a value that has been used cannot come late.
template <Scope S, class T>
DEEP_EP_DEVICE void add_after_reads(T* p, std::type_identity_t<T> value) {
#if DEEP_EP_TARGET_CUDA
  add_relaxed<S>(p, value);
#else
  add_release<S>(p, value);
#endif
}

/// A fetch_add_acq_rel of those who have only read what others may overwrite, when all have come: for the last of them
/// to say so, by stores behind a branch on the value. On the GPU relaxed, as add_after_reads.
template <Scope S, class T>
DEEP_EP_DEVICE T fetch_add_after_reads(T* p, std::type_identity_t<T> value) {
#if DEEP_EP_TARGET_CUDA
  return fetch_add_relaxed<S>(p, value);
#else
  return fetch_add_acq_rel<S>(p, value);
#endif
}

/// Makes relaxed stores after it release, and relaxed loads before it acquire.
template <Scope S>
DEEP_EP_DEVICE void fence() {
#if DEEP_EP_TARGET_CUDA
  ptx::fence<S>();
#else
  host_machine::fence();
#endif
}

// ---- Payload: 4, 8 or 16 bytes, aligned. No order of its own: it is ordered by flags and barriers around it ----

/// Local global memory that nobody writes while the kernel runs; read once. Never for what a peer writes.
template <class T>
DEEP_EP_DEVICE T load_stream(const T* p) {
  static_assert(detail::is_payload<T>);
#if DEEP_EP_TARGET_CUDA
  return ptx::load_stream(p);
#else
  return *p;
#endif
}

/// Global memory that others, peers too, write before a flag that this thread acquired.
template <class T>
DEEP_EP_DEVICE T load_weak(const T* p) {
  static_assert(detail::is_payload<T>);
#if DEEP_EP_TARGET_CUDA
  return ptx::load_weak(p);
#else
  return *p;
#endif
}

/// Global memory, a peer's too, that this block does not read again soon.
template <class T>
DEEP_EP_DEVICE void store_stream(T* p, const std::type_identity_t<T>& value) {
  static_assert(detail::is_payload<T>);
#if DEEP_EP_TARGET_CUDA
  ptx::store_stream(p, value);
#else
  *p = value;
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
