#include "tools/bench/gpu.hpp"

#if DEEP_EP_HAVE_CUDA
#include <cuda_runtime_api.h>

#include <cstring>
#include <vector>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"
#endif
#if DEEP_EP_HAVE_NCCL
#include <nccl.h>
#endif

namespace deep_ep::tools {

#if DEEP_EP_HAVE_CUDA
namespace {

void check(cudaError_t result, const char* what) {
  if (result != cudaSuccess) fail<SystemError>("{}: {}", what, cudaGetErrorString(result));
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

#if DEEP_EP_HAVE_NCCL
namespace {

void check(ncclResult_t result, const char* what) {
  if (result != ncclSuccess) fail<SystemError>("{}: {}", what, ncclGetErrorString(result));
}

class NcclSendReceive final : public NcclTransport {
 public:
  NcclSendReceive(Bootstrap& bootstrap, Executor& executor) : executor_(executor), ranks_(bootstrap.size()) {
    ncclUniqueId id{};
    if (bootstrap.rank() == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    const std::vector<std::byte> all = bootstrap.all_gather(std::as_bytes(std::span(&id, 1)));
    std::memcpy(&id, all.data(), sizeof(id));
    executor_.make_current();
    check(cudaSetDevice(executor.device().index), "cudaSetDevice");
    check(ncclCommInitRank(&communicator_, ranks_, id, bootstrap.rank()), "ncclCommInitRank");
  }
  ~NcclSendReceive() override {
    release();
    ncclCommDestroy(communicator_);
  }

  std::string name() const override {
    int version = 0;
    ncclGetVersion(&version);
    return fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
  }

  void prepare(std::span<const std::int64_t> send, std::span<const std::int64_t> receive) override {
    release();
    send_bytes_.assign(send.begin(), send.end());
    receive_bytes_.assign(receive.begin(), receive.end());
    send_ = allocate(send_bytes_);
    receive_ = allocate(receive_bytes_);
  }

  void enqueue(StreamHandle stream) override {
    auto* to = static_cast<char*>(receive_);
    const auto* from = static_cast<const char*>(send_);
    auto* cuda_stream = static_cast<cudaStream_t>(stream);
    check(ncclGroupStart(), "ncclGroupStart");
    for (int rank = 0; rank < ranks_; ++rank) {
      const auto sent = static_cast<std::size_t>(send_bytes_[static_cast<std::size_t>(rank)]);
      const auto received = static_cast<std::size_t>(receive_bytes_[static_cast<std::size_t>(rank)]);
      if (sent > 0) check(ncclSend(from, sent, ncclUint8, rank, communicator_, cuda_stream), "ncclSend");
      if (received > 0) check(ncclRecv(to, received, ncclUint8, rank, communicator_, cuda_stream), "ncclRecv");
      from += sent;
      to += received;
    }
    check(ncclGroupEnd(), "ncclGroupEnd");
  }

 private:
  void* allocate(const std::vector<std::int64_t>& bytes) {
    std::size_t total = 256;
    for (const std::int64_t part : bytes) total += static_cast<std::size_t>(part);
    return executor_.allocate(total);
  }
  void release() {
    executor_.free(send_);
    executor_.free(receive_);
    send_ = receive_ = nullptr;
  }

  Executor& executor_;
  int ranks_;
  ncclComm_t communicator_ = nullptr;
  std::vector<std::int64_t> send_bytes_;
  std::vector<std::int64_t> receive_bytes_;
  void* send_ = nullptr;
  void* receive_ = nullptr;
};

}  // namespace

std::unique_ptr<NcclTransport> make_nccl_transport(Bootstrap& bootstrap, Executor& executor) {
  if (executor.device().kind != Device::Kind::cuda) return nullptr;
  return std::make_unique<NcclSendReceive>(bootstrap, executor);
}
#else
std::unique_ptr<NcclTransport> make_nccl_transport(Bootstrap&, Executor&) { return nullptr; }
#endif

}  // namespace deep_ep::tools
