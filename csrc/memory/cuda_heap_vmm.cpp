// Heaps shared through virtual memory management: as file descriptors inside a host, as fabric handles across hosts.
#include "csrc/bootstrap/agreement.hpp"
#include "csrc/memory/cuda_shared_memory.hpp"
#include "csrc/memory/cuda_vmm.hpp"
#include "csrc/memory/fd_exchange.hpp"

namespace deep_ep {
namespace {

class VmmSharedMemory final : public CudaSharedMemory {
 public:
  VmmSharedMemory(std::shared_ptr<const cuda::Context> context, std::vector<cuda::VmmMapping> mappings,
                  std::size_t own_rank)
      : context_(std::move(context)), mappings_(std::move(mappings)), own_rank_(own_rank) {
    for (const cuda::VmmMapping& mapping : mappings_) peers_.push_back(mapping.data());
  }

  const std::vector<std::byte*>& peers() const override { return peers_; }

  void unmap_peers() noexcept override {
    for (std::size_t rank = 0; rank < mappings_.size(); ++rank) {
      if (rank == own_rank_) continue;
      const cuda::VmmMapping gone = std::move(mappings_[rank]);
      peers_[rank] = nullptr;
    }
  }

 private:
  std::shared_ptr<const cuda::Context> context_;  // before the mappings: it goes last
  std::vector<cuda::VmmMapping> mappings_;
  std::size_t own_rank_;
  std::vector<std::byte*> peers_;
};

// `import_peer(rank)` gives the memory of another rank.
template <class ImportPeer>
std::unique_ptr<CudaSharedMemory> map_all(const CudaSharingGroup& group, cuda::VmmMapping own, ImportPeer import_peer) {
  std::unique_ptr<CudaSharedMemory> result;
  agree(*group.bootstrap, "mapping the heaps of peers", [&] {
    std::vector<cuda::VmmMapping> mappings(group.size());
    mappings[group.rank()] = std::move(own);
    for (std::size_t peer = 0; peer < group.size(); ++peer) {
      if (peer == group.rank() || !group.maps(peer)) continue;
      const cuda::VmmMemory memory = import_peer(peer);
      mappings[peer] = cuda::VmmMapping(memory, group.plan.bytes);
    }
    result = std::make_unique<VmmSharedMemory>(group.context, std::move(mappings), group.rank());
  });
  return result;
}

std::unique_ptr<CudaSharedMemory> share_by_fd(const CudaSharingGroup& group) {
  UniqueFd exported;
  cuda::VmmMapping own;
  agree(*group.bootstrap, "allocating the heap", [&] {
    const auto memory =
        cuda::VmmMemory::create(*group.context, group.plan.bytes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    own = cuda::VmmMapping(memory, group.plan.bytes);
    exported = memory.export_fd();
  });
  std::vector<ProcessIdentity> processes;
  for (const HeapCapabilities& rank : group.ranks) processes.push_back(rank.process);
  const std::vector<UniqueFd> fds = exchange_fds(*group.bootstrap, exported.get(), processes, group.timeout_s);
  return map_all(group, std::move(own),
                 [&](std::size_t peer) { return cuda::VmmMemory::import(*group.context, fds[peer].get()); });
}

std::unique_ptr<CudaSharedMemory> share_by_fabric(const CudaSharingGroup& group) {
  CUmemFabricHandle exported{};
  cuda::VmmMapping own;
  agree(*group.bootstrap, "allocating the heap", [&] {
    const auto memory = cuda::VmmMemory::create(*group.context, group.plan.bytes, CU_MEM_HANDLE_TYPE_FABRIC);
    own = cuda::VmmMapping(memory, group.plan.bytes);
    exported = memory.export_fabric();
  });
  const std::vector<CUmemFabricHandle> handles = all_gather_values(*group.bootstrap, exported);
  return map_all(group, std::move(own),
                 [&](std::size_t peer) { return cuda::VmmMemory::import(*group.context, handles[peer]); });
}

}  // namespace

std::unique_ptr<CudaSharedMemory> make_vmm_shared_memory(const CudaSharingGroup& group) {
  return group.plan.kind == HeapKind::fabric ? share_by_fabric(group) : share_by_fd(group);
}

}  // namespace deep_ep
