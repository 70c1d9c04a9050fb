#include "csrc/executor/cuda/check.hpp"

#include "csrc/executor/cuda/driver.hpp"

namespace deep_ep::cuda {

void throw_runtime_error(cudaError_t result, int device, const std::string& call) {
  // The runtime keeps the last error; if it stayed, the next kernel launch would be blamed for it.
  cudaGetLastError();
  const std::string text =
      fmt::format("{} on GPU {} failed: {} ({})", call, device, cudaGetErrorString(result), cudaGetErrorName(result));
  if (result == cudaErrorMemoryAllocation) throw OutOfMemory(text);
  throw SystemError(text);
}

void throw_driver_error(CUresult result, int device, const std::string& call) {
  const char* name = nullptr;
  const char* description = nullptr;
  driver().get_error_name(result, &name);
  driver().get_error_string(result, &description);
  const std::string text =
      fmt::format("{} on GPU {} failed: {} ({})", call, device, description != nullptr ? description : "unknown error",
                  name != nullptr ? name : fmt::to_string(static_cast<int>(result)));
  if (result == CUDA_ERROR_OUT_OF_MEMORY) throw OutOfMemory(text);
  throw SystemError(text);
}

}  // namespace deep_ep::cuda
