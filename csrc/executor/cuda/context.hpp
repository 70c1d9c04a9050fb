// A GPU as this process uses it, guards that make it current for a while, and what turns failed CUDA calls into
// exceptions that say what was asked of which GPU, and what came back.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "csrc/support/format.hpp"

namespace deep_ep::cuda {

[[noreturn]] void throw_error(cudaError_t error, int device, const std::string& call);

/// `result` is the runtime's, or the driver's: the same numbers mean the same. `call` names the call; further arguments
/// are formatted into it, on failure only.
template <class Result, class... Args>
void check(Result result, int device, fmt::format_string<Args...> call, Args&&... args) {
  const auto error = static_cast<cudaError_t>(result);
  if (error != cudaSuccess) throw_error(error, device, fmt::format(call, std::forward<Args>(args)...));
}

/// The primary context of a GPU, the one that the CUDA runtime uses too, kept alive.
struct Context {
  explicit Context(int ordinal);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  const int device;
  CUdevice driver_device = 0;
  CUcontext handle = nullptr;
};

/// True when the GPU is the calling thread's current one. Cheap.
bool is_current(const Context& context);

/// Makes the GPU current for the calling thread, on top of what is. False: it was current already.
bool push_current(const Context& context);
/// The end of a push_current that was true: what was current is current again.
void pop_current() noexcept;

/// Makes the GPU current for the calling thread, and restores what was current. Not cudaSetDevice: restoring with it
/// would create a context, and take memory, on a GPU that the thread had never used.
class CurrentContext {
 public:
  explicit CurrentContext(const Context& context) : pushed_(push_current(context)) {}
  ~CurrentContext() {
    if (pushed_) pop_current();
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  bool pushed_;
};

/// The same, for calls such as cudaMalloc or cudaEventQuery: while another stream records a graph in the strict
/// (global) mode, they would spoil the recording from any thread. Ours never depend on recorded work, so this thread
/// may make them.
class RelaxedContext : public CurrentContext {
 public:
  explicit RelaxedContext(const Context& context) : CurrentContext(context) {
    cudaThreadExchangeStreamCaptureMode(&mode_);
  }
  ~RelaxedContext() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

/// The number of the recording of a graph that the stream takes part in; 0: none.
std::uint64_t capture_id(cudaStream_t stream, int device);

}  // namespace deep_ep::cuda
