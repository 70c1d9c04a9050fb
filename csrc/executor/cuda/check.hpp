// Turns failed CUDA calls into exceptions that say what was asked of which GPU, and what came back.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::cuda {

[[noreturn]] void throw_runtime_error(cudaError_t result, int device, const std::string& call);
[[noreturn]] void throw_driver_error(CUresult result, int device, const std::string& call);

/// `call` names the call; further arguments are formatted into it, on failure only.
template <class... Args>
void check(cudaError_t result, int device, fmt::format_string<Args...> call, Args&&... args) {
  if (result != cudaSuccess) throw_runtime_error(result, device, fmt::format(call, std::forward<Args>(args)...));
}
template <class... Args>
void check(CUresult result, int device, fmt::format_string<Args...> call, Args&&... args) {
  if (result != CUDA_SUCCESS) throw_driver_error(result, device, fmt::format(call, std::forward<Args>(args)...));
}

/// For functions that must not throw: runs `action` and ignores failures. At exit the driver may be gone already.
template <class Action>
void quietly(Action&& action) noexcept {
  try {
    action();
  } catch (...) {
    // Nobody is left to tell.
  }
}

}  // namespace deep_ep::cuda
