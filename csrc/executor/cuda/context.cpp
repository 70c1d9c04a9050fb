#include "csrc/executor/cuda/context.hpp"

#include <algorithm>

#include "csrc/executor/cuda/driver.hpp"

namespace deep_ep::cuda {

void throw_error(cudaError_t error, int device, const std::string& call) {
  // The runtime keeps the last error; if it stayed, the next kernel launch would be blamed for it.
  cudaGetLastError();
  const std::string text =
      fmt::format("{} on GPU {} failed: {} ({})", call, device, cudaGetErrorString(error), cudaGetErrorName(error));
  if (error == cudaErrorMemoryAllocation) throw OutOfMemory(text);
  throw SystemError(text);
}

Context::Context(int ordinal) : device(ordinal) {
  check(driver().device_get(&driver_device, device), device, "cuDeviceGet");
  check(driver().primary_context_retain(&handle, driver_device), device, "cuDevicePrimaryCtxRetain");
}

Context::~Context() { driver().primary_context_release(driver_device); }

bool is_current(const Context& context) {
  CUcontext current = nullptr;
  check(driver().context_get_current(&current), context.device, "cuCtxGetCurrent");
  return current == context.handle;
}

bool push_current(const Context& context) {
  if (is_current(context)) return false;
  check(driver().context_push(context.handle), context.device, "cuCtxPushCurrent");
  return true;
}

void pop_current() noexcept {
  CUcontext popped = nullptr;
  driver().context_pop(&popped);
}

std::uint64_t capture_id(cudaStream_t stream, int device) {
  // The legacy default stream cannot be recorded, and asking while another stream is would be an error.
  if (stream == nullptr || stream == cudaStreamLegacy) return 0;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  check(cudaStreamGetCaptureInfo(stream, &status, &id), device, "cudaStreamGetCaptureInfo");
  if (status == cudaStreamCaptureStatusNone) return 0;
  return std::max<std::uint64_t>(id, 1);  // one that has failed has no number
}

}  // namespace deep_ep::cuda
