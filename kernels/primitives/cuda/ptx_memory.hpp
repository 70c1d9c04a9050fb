// The PTX of memory.hpp: words of 4 and 8 bytes, by order and scope.
#pragma once

#include "kernels/primitives/target.hpp"

namespace deep_ep::device {

// One statement for each scope. `.global` saves the address check where the scope implies it.
#define DEEP_EP_PTX_BY_SCOPE(BEFORE, AFTER, ...)                                                  \
  if constexpr (S == Scope::block) asm volatile(BEFORE ".cta" AFTER __VA_ARGS__ : "memory");      \
  if constexpr (S == Scope::gpu) asm volatile(BEFORE ".gpu.global" AFTER __VA_ARGS__ : "memory"); \
  if constexpr (S == Scope::system) asm volatile(BEFORE ".sys.global" AFTER __VA_ARGS__ : "memory");

// Each for words of both sizes.
#define DEEP_EP_PTX_LOAD(NAME, ORDER)                                             \
  template <Scope S, detail::Word T>                                              \
  DEEP_EP_DEVICE T NAME(const T* p) {                                             \
    T value;                                                                      \
    if constexpr (sizeof(T) == 4) {                                               \
      DEEP_EP_PTX_BY_SCOPE("ld." ORDER, ".u32 %0, [%1];", : "=r"(value) : "l"(p)) \
    } else {                                                                      \
      DEEP_EP_PTX_BY_SCOPE("ld." ORDER, ".u64 %0, [%1];", : "=l"(value) : "l"(p)) \
    }                                                                             \
    return value;                                                                 \
  }
#define DEEP_EP_PTX_WRITE(NAME, OPERATION, BEFORE_TYPE)                                  \
  template <Scope S, detail::Word T>                                                     \
  DEEP_EP_DEVICE void NAME(T* p, std::type_identity_t<T> value) {                        \
    if constexpr (sizeof(T) == 4) {                                                      \
      DEEP_EP_PTX_BY_SCOPE(OPERATION, BEFORE_TYPE "u32 [%0], %1;", ::"l"(p), "r"(value)) \
    } else {                                                                             \
      DEEP_EP_PTX_BY_SCOPE(OPERATION, BEFORE_TYPE "u64 [%0], %1;", ::"l"(p), "l"(value)) \
    }                                                                                    \
  }
#define DEEP_EP_PTX_FETCH_ADD(NAME, ORDER)                                                            \
  template <Scope S, detail::Word T>                                                                  \
  DEEP_EP_DEVICE T NAME(T* p, std::type_identity_t<T> value) {                                        \
    T old;                                                                                            \
    if constexpr (sizeof(T) == 4) {                                                                   \
      DEEP_EP_PTX_BY_SCOPE("atom." ORDER, ".add.u32 %0, [%1], %2;", : "=r"(old) : "l"(p), "r"(value)) \
    } else {                                                                                          \
      DEEP_EP_PTX_BY_SCOPE("atom." ORDER, ".add.u64 %0, [%1], %2;", : "=l"(old) : "l"(p), "l"(value)) \
    }                                                                                                 \
    return old;                                                                                       \
  }

DEEP_EP_PTX_LOAD(load_acquire, "acquire")
DEEP_EP_PTX_LOAD(load_relaxed, "relaxed")
DEEP_EP_PTX_WRITE(store_release, "st.release", ".")
DEEP_EP_PTX_WRITE(store_relaxed, "st.relaxed", ".")
DEEP_EP_PTX_WRITE(add_relaxed, "red.relaxed", ".add.")
DEEP_EP_PTX_WRITE(add_release, "red.release", ".add.")
DEEP_EP_PTX_FETCH_ADD(fetch_add_relaxed, "relaxed")
DEEP_EP_PTX_FETCH_ADD(fetch_add_acq_rel, "acq_rel")

template <Scope S, detail::Word T>
DEEP_EP_DEVICE T compare_exchange(T* p, std::type_identity_t<T> expected, std::type_identity_t<T> desired) {
  static_assert(sizeof(T) == 8);
  T old;
  DEEP_EP_PTX_BY_SCOPE("atom.acq_rel", ".cas.b64 %0, [%1], %2, %3;", : "=l"(old) : "l"(p), "l"(expected), "l"(desired))
  return old;
}

template <Scope S>
DEEP_EP_DEVICE void fence() {
  if constexpr (S == Scope::block) asm volatile("fence.acq_rel.cta;" ::: "memory");
  if constexpr (S == Scope::gpu) asm volatile("fence.acq_rel.gpu;" ::: "memory");
  if constexpr (S == Scope::system) asm volatile("fence.acq_rel.sys;" ::: "memory");
}

namespace ptx {

/// Up to 2^31 - 1. (Without this end the compiler would take it for an addition.)
DEEP_EP_DEVICE std::uint32_t increment(std::uint32_t* p) {
  std::uint32_t old;
  asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(0x7fffffffu) : "memory");
  return old;
}

/// 16 bytes at once, at system scope.
DEEP_EP_DEVICE void store_pair(std::uint64_t* p, std::uint64_t first, std::uint64_t second) {
  asm volatile("{\n.reg .b128 both;\nmov.b128 both, {%1, %2};\nst.relaxed.sys.global.b128 [%0], both;\n}" ::"l"(p),
               "l"(first), "l"(second)
               : "memory");
}
DEEP_EP_DEVICE void load_pair(const std::uint64_t* p, std::uint64_t& first, std::uint64_t& second) {
  asm volatile("{\n.reg .b128 both;\nld.relaxed.sys.global.b128 both, [%2];\nmov.b128 {%0, %1}, both;\n}"
               : "=l"(first), "=l"(second)
               : "l"(p)
               : "memory");
}

}  // namespace ptx

#undef DEEP_EP_PTX_BY_SCOPE
#undef DEEP_EP_PTX_LOAD
#undef DEEP_EP_PTX_WRITE
#undef DEEP_EP_PTX_FETCH_ADD

// Payload. The type is moved as one, two or four 32-bit words.

#define DEEP_EP_PTX_PAYLOAD_LOAD(NAME, OP)                                                               \
  template <detail::Payload T>                                                                           \
  DEEP_EP_DEVICE T NAME(const T* p) {                                                                    \
    std::uint32_t word[sizeof(T) / 4];                                                                   \
    if constexpr (sizeof(T) == 4) asm volatile(OP ".u32 %0, [%1];" : "=r"(word[0]) : "l"(p) : "memory"); \
    if constexpr (sizeof(T) == 8)                                                                        \
      asm volatile(OP ".v2.u32 {%0, %1}, [%2];" : "=r"(word[0]), "=r"(word[1]) : "l"(p) : "memory");     \
    if constexpr (sizeof(T) == 16)                                                                       \
      asm volatile(OP ".v4.u32 {%0, %1, %2, %3}, [%4];"                                                  \
                   : "=r"(word[0]), "=r"(word[1]), "=r"(word[2]), "=r"(word[3])                          \
                   : "l"(p)                                                                              \
                   : "memory");                                                                          \
    T value;                                                                                             \
    memcpy(&value, word, sizeof(T));                                                                     \
    return value;                                                                                        \
  }

DEEP_EP_PTX_PAYLOAD_LOAD(load_stream, "ld.global.nc.L1::no_allocate")
DEEP_EP_PTX_PAYLOAD_LOAD(load_weak, "ld.global")
#undef DEEP_EP_PTX_PAYLOAD_LOAD

template <detail::Payload T>
DEEP_EP_DEVICE void store_stream(T* p, const std::type_identity_t<T>& value) {
  std::uint32_t word[sizeof(T) / 4];
  memcpy(word, &value, sizeof(T));
  if constexpr (sizeof(T) == 4)
    asm volatile("st.global.L1::no_allocate.u32 [%0], %1;" ::"l"(p), "r"(word[0]) : "memory");
  if constexpr (sizeof(T) == 8)
    asm volatile("st.global.L1::no_allocate.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(word[0]), "r"(word[1]) : "memory");
  if constexpr (sizeof(T) == 16)
    asm volatile("st.global.L1::no_allocate.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(word[0]), "r"(word[1]),
                 "r"(word[2]), "r"(word[3])
                 : "memory");
}

}  // namespace deep_ep::device
