#include "tools/bench/gpu.hpp"

#if DEEP_EP_HAVE_CUDA
#include <cuda_runtime_api.h>

#include <cstring>
#include <memory>
#include <numeric>
#include <span>

#include "csrc/support/format.hpp"
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

}  // namespace

Enqueue record_graph(Executor& executor, StreamHandle stream, const std::function<void()>& work) {
  if (executor.device().kind != Device::Kind::cuda) return nullptr;
  executor.make_current();
  const auto native = static_cast<cudaStream_t>(stream);
  // Other threads of this process are ranks of their own, and may do what a recording forbids.
  check(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  cudaGraph_t graph = nullptr;
  try {
    work();
  } catch (...) {
    cudaStreamEndCapture(native, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  check(cudaStreamEndCapture(native, &graph), "cudaStreamEndCapture");
  cudaGraphExec_t executable = nullptr;
  const cudaError_t result = cudaGraphInstantiate(&executable, graph, 0);
  cudaGraphDestroy(graph);
  check(result, "cudaGraphInstantiate");
  const std::shared_ptr<CUgraphExec_st> kept(executable, cudaGraphExecDestroy);
  return
      [kept](StreamHandle on) { check(cudaGraphLaunch(kept.get(), static_cast<cudaStream_t>(on)), "cudaGraphLaunch"); };
}
#else
Enqueue record_graph(Executor&, StreamHandle, const std::function<void()>&) { return nullptr; }
#endif

#if DEEP_EP_HAVE_NCCL
namespace {

void check(ncclResult_t result, const char* what) {
  if (result != ncclSuccess) fail<SystemError>("{}: {}", what, ncclGetErrorString(result));
}

/// One after the other in memory.
std::shared_ptr<char> memory_for(Executor& executor, const std::vector<std::int64_t>& parts) {
  const auto bytes = static_cast<std::size_t>(std::accumulate(parts.begin(), parts.end(), std::int64_t{256}));
  return {static_cast<char*>(executor.allocate(bytes)), [&executor](char* memory) { executor.free(memory); }};
}

}  // namespace

std::optional<NcclTransport> make_nccl_transport(Bootstrap& bootstrap, Executor& executor) {
  if (executor.device().kind != Device::Kind::cuda) return std::nullopt;
  int version = 0;
  ncclGetVersion(&version);
  ncclUniqueId id{};
  if (bootstrap.rank() == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
  const std::vector<std::byte> all = bootstrap.all_gather(std::as_bytes(std::span(&id, 1)));
  std::memcpy(&id, all.data(), sizeof(id));
  executor.make_current();
  check(cudaSetDevice(executor.device().index), "cudaSetDevice");
  ncclComm_t made = nullptr;
  check(ncclCommInitRank(&made, bootstrap.size(), id, bootstrap.rank()), "ncclCommInitRank");
  const std::shared_ptr<ncclComm> communicator(made, ncclCommDestroy);
  const auto exchange = [&executor, communicator](const std::vector<std::int64_t>& send,
                                                  const std::vector<std::int64_t>& receive) -> Enqueue {
    const auto sent = memory_for(executor, send), received = memory_for(executor, receive);
    return [=](StreamHandle stream) {
      const char* from = sent.get();
      char* to = received.get();
      const auto native = static_cast<cudaStream_t>(stream);
      check(ncclGroupStart(), "ncclGroupStart");
      for (std::size_t rank = 0; rank < send.size(); ++rank) {
        const auto out = static_cast<std::size_t>(send[rank]), in = static_cast<std::size_t>(receive[rank]);
        const int peer = static_cast<int>(rank);
        if (out > 0) check(ncclSend(from, out, ncclUint8, peer, communicator.get(), native), "ncclSend");
        if (in > 0) check(ncclRecv(to, in, ncclUint8, peer, communicator.get(), native), "ncclRecv");
        from += out;
        to += in;
      }
      check(ncclGroupEnd(), "ncclGroupEnd");
    };
  };
  return NcclTransport{fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100), exchange};
}
#else
std::optional<NcclTransport> make_nccl_transport(Bootstrap&, Executor&) { return std::nullopt; }
#endif

}  // namespace deep_ep::tools
