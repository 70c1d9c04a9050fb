#include "tools/bench/graph.hpp"

#if DEEP_EP_HAVE_CUDA
#include <cuda_runtime_api.h>
#include <fmt/format.h>

#include "deep_ep/error.hpp"
#endif

namespace deep_ep::tools {

#if DEEP_EP_HAVE_CUDA
namespace {

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) throw SystemError(fmt::format("{}: {}", what, cudaGetErrorString(result)));
}

class CudaGraph final : public Graph {
 public:
  explicit CudaGraph(cudaGraph_t graph) : graph_(graph) {
    check(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
  }
  ~CudaGraph() override {
    if (executable_ != nullptr) cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }
  void launch(StreamHandle stream) override {
    check(cudaGraphLaunch(executable_, static_cast<cudaStream_t>(stream)), "cudaGraphLaunch");
  }

 private:
  cudaGraph_t graph_;
  cudaGraphExec_t executable_ = nullptr;
};

}  // namespace

std::unique_ptr<Graph> record_graph(Executor& executor, StreamHandle stream, const std::function<void()>& enqueue) {
  if (executor.device().kind != Device::Kind::cuda) return nullptr;
  executor.make_current();
  const auto native = static_cast<cudaStream_t>(stream);
  // Other threads of this process are ranks of their own, and may do what a recording forbids.
  check(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  cudaGraph_t graph = nullptr;
  try {
    enqueue();
  } catch (...) {
    cudaStreamEndCapture(native, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  check(cudaStreamEndCapture(native, &graph), "cudaStreamEndCapture");
  return std::make_unique<CudaGraph>(graph);
}
#else
std::unique_ptr<Graph> record_graph(Executor&, StreamHandle, const std::function<void()>&) { return nullptr; }
#endif

}  // namespace deep_ep::tools
