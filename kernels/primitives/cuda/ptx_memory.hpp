// The PTX of memory.hpp: words of 4 and 8 bytes, by order and scope.
#pragma once

#include "kernels/primitives/target.hpp"

// One statement for each scope. `.global` saves the address check where the scope implies it.
#define DEEP_EP_PTX_BY_SCOPE(BEFORE, AFTER, ...)                                                  \
  if constexpr (S == Scope::block) asm volatile(BEFORE ".cta" AFTER __VA_ARGS__ : "memory");      \
  if constexpr (S == Scope::gpu) asm volatile(BEFORE ".gpu.global" AFTER __VA_ARGS__ : "memory"); \
  if constexpr (S == Scope::system) asm volatile(BEFORE ".sys.global" AFTER __VA_ARGS__ : "memory");

// Each for words of both sizes.
#define DEEP_EP_WORD_LOAD(NAME, ORDER, HOST_ORDER)                                \
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
#define DEEP_EP_WORD_WRITE(NAME, OPERATION, BEFORE_TYPE, HOST_OPERATION, HOST_ORDER)     \
  template <Scope S, detail::Word T>                                                     \
  DEEP_EP_DEVICE void NAME(T* p, std::type_identity_t<T> value) {                        \
    if constexpr (sizeof(T) == 4) {                                                      \
      DEEP_EP_PTX_BY_SCOPE(OPERATION, BEFORE_TYPE "u32 [%0], %1;", ::"l"(p), "r"(value)) \
    } else {                                                                             \
      DEEP_EP_PTX_BY_SCOPE(OPERATION, BEFORE_TYPE "u64 [%0], %1;", ::"l"(p), "l"(value)) \
    }                                                                                    \
  }
#define DEEP_EP_WORD_FETCH_ADD(NAME, ORDER, HOST_ORDER)                                               \
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

// Payload. The type is moved as one, two or four 32-bit words.
#define DEEP_EP_PAYLOAD_LOAD(NAME, OP)                                                                   \
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
