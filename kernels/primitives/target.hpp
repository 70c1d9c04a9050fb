// What a kernel source is being compiled for. The same file is given to nvcc (target: GPU) and to the C++ compiler
// (target: the host machine of machine/). Everything that differs is hidden behind this folder's functions.
#pragma once

#include <cstddef>
#include <cstdint>

// DEEP_EP_DEVICE_CALL: a device function that is called, not inlined. For what seldom runs and needs many registers.
#if defined(__CUDACC__)
#define DEEP_EP_TARGET_CUDA 1
#define DEEP_EP_DEVICE __device__ __forceinline__
#define DEEP_EP_DEVICE_CALL __device__ __noinline__ inline
#define DEEP_EP_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define DEEP_EP_TARGET_CUDA 0
#define DEEP_EP_DEVICE inline
#define DEEP_EP_DEVICE_CALL inline
#define DEEP_EP_HOST_DEVICE inline
#endif

// Built with ThreadSanitizer / AddressSanitizer? GCC defines the macros, Clang has __has_feature.
#if defined(__has_feature)
#define DEEP_EP_HAS_FEATURE(feature) __has_feature(feature)
#else
#define DEEP_EP_HAS_FEATURE(feature) 0
#endif
#if defined(__SANITIZE_THREAD__) || DEEP_EP_HAS_FEATURE(thread_sanitizer)
#define DEEP_EP_TSAN 1
#else
#define DEEP_EP_TSAN 0
#endif
#if defined(__SANITIZE_ADDRESS__) || DEEP_EP_HAS_FEATURE(address_sanitizer)
#define DEEP_EP_ASAN 1
#else
#define DEEP_EP_ASAN 0
#endif

namespace deep_ep::device {

/// The largest word that one instruction moves.
struct alignas(16) Vec16 {
  std::uint32_t word[4];
};

}  // namespace deep_ep::device
