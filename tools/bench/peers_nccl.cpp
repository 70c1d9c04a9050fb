// NCCL's grouped send and receive, the usual way to exchange tokens without a library of this kind.
#include "tools/bench/peers.hpp"

#if DEEP_EP_HAVE_NCCL
#include <cuda_runtime_api.h>
#include <fmt/format.h>
#include <nccl.h>

#include <cstring>
#include <vector>

#include "deep_ep/error.hpp"
#endif

namespace deep_ep::tools {

#if DEEP_EP_HAVE_NCCL
namespace {

void check(ncclResult_t result, const char* what) {
  if (result != ncclSuccess) throw SystemError(fmt::format("{}: {}", what, ncclGetErrorString(result)));
}

class NcclTransport final : public PeerTransport {
 public:
  NcclTransport(Bootstrap& bootstrap, Executor& executor) : executor_(executor), ranks_(bootstrap.size()) {
    ncclUniqueId id{};
    if (bootstrap.rank() == 0) check(ncclGetUniqueId(&id), "ncclGetUniqueId");
    const std::vector<std::byte> all = bootstrap.all_gather(std::as_bytes(std::span(&id, 1)));
    std::memcpy(&id, all.data(), sizeof(id));
    executor_.make_current();
    if (const cudaError_t result = cudaSetDevice(executor.device().index); result != cudaSuccess) {
      throw SystemError(fmt::format("cudaSetDevice: {}", cudaGetErrorString(result)));
    }
    check(ncclCommInitRank(&communicator_, ranks_, id, bootstrap.rank()), "ncclCommInitRank");
  }
  ~NcclTransport() override {
    release();
    ncclCommDestroy(communicator_);
  }

  std::string name() const override {
    int version = 0;
    ncclGetVersion(&version);
    return fmt::format("NCCL {}.{}.{}", version / 10000, version / 100 % 100, version % 100);
  }
  int num_sms() const override { return -1; }

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

std::unique_ptr<PeerTransport> make_nccl_transport(Bootstrap& bootstrap, Executor& executor) {
  if (executor.device().kind != Device::Kind::cuda) return nullptr;
  return std::make_unique<NcclTransport>(bootstrap, executor);
}
#else
std::unique_ptr<PeerTransport> make_nccl_transport(Bootstrap&, Executor&) { return nullptr; }
#endif

}  // namespace deep_ep::tools
