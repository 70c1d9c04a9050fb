// Heaps from cudaMalloc, shared through CUDA IPC between processes and as plain pointers inside one.
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/executor/cuda/check.hpp"
#include "csrc/memory/cuda_shared_memory.hpp"

namespace deep_ep {
namespace {

class IpcSharedMemory final : public CudaSharedMemory {
 public:
  IpcSharedMemory(std::shared_ptr<const cuda::Context> context, std::size_t ranks)
      : context_(std::move(context)), peers_(ranks), opened_(ranks) {}

  ~IpcSharedMemory() override {
    unmap_peers();
    if (own_ != nullptr) cudaFree(own_);
  }

  const std::vector<std::byte*>& peers() const override { return peers_; }

  void unmap_peers() noexcept override {
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
      if (peers_[rank] == own_) continue;
      if (opened_[rank]) cudaIpcCloseMemHandle(peers_[rank]);
      opened_[rank] = false;
      peers_[rank] = nullptr;
    }
  }

  void allocate(std::size_t rank, std::size_t bytes) {
    void* memory = nullptr;
    cuda::check(cudaMalloc(&memory, bytes), context_->device(), "cudaMalloc of {}", format_bytes(bytes));
    own_ = static_cast<std::byte*>(memory);
    peers_[rank] = own_;
  }

  void open(std::size_t rank, const cudaIpcMemHandle_t& handle) {
    void* memory = nullptr;
    cuda::check(cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess), context_->device(),
                "cudaIpcOpenMemHandle of the heap of rank {}", rank);
    peers_[rank] = static_cast<std::byte*>(memory);
    opened_[rank] = true;
  }

  // A process cannot open a handle that it exported itself; there the pointer works, once access is enabled.
  void adopt(std::size_t rank, std::byte* pointer, int device) {
    if (device != context_->device()) {
      const cudaError_t result = cudaDeviceEnablePeerAccess(device, 0);
      if (result == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
      } else {
        cuda::check(result, context_->device(), "cudaDeviceEnablePeerAccess to GPU {} of rank {}", device, rank);
      }
    }
    peers_[rank] = pointer;
  }

  std::byte* own() const { return own_; }

 private:
  std::shared_ptr<const cuda::Context> context_;
  std::vector<std::byte*> peers_;
  std::vector<bool> opened_;
  std::byte* own_ = nullptr;
};

struct Export {
  cudaIpcMemHandle_t handle{};
  std::byte* pointer = nullptr;
};

}  // namespace

std::unique_ptr<CudaSharedMemory> make_ipc_shared_memory(const CudaSharingGroup& group) {
  auto memory = std::make_unique<IpcSharedMemory>(group.context, group.size());
  Export mine;
  agree(*group.bootstrap, "allocating the heap", [&] {
    memory->allocate(group.rank(), group.plan.bytes);
    mine.pointer = memory->own();
    cuda::check(cudaIpcGetMemHandle(&mine.handle, mine.pointer), group.context->device(), "cudaIpcGetMemHandle");
  });
  const std::vector<Export> exports = all_gather_values(*group.bootstrap, mine);
  agree(*group.bootstrap, "mapping the heaps of peers", [&] {
    for (std::size_t peer = 0; peer < group.size(); ++peer) {
      if (peer == group.rank() || !group.maps(peer)) continue;
      if (group.ranks[peer].process.same_process(group.ranks[group.rank()].process)) {
        memory->adopt(peer, exports[peer].pointer, group.ranks[peer].device);
      } else {
        memory->open(peer, exports[peer].handle);
      }
    }
  });
  return memory;
}

}  // namespace deep_ep
