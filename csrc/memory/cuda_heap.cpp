// The symmetric heap on GPUs: three ways to share memory.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/executor/cuda/context.hpp"
#include "csrc/memory/cuda_vmm.hpp"
#include "csrc/memory/fd_exchange.hpp"
#include "csrc/memory/heap_choice.hpp"
#include "csrc/memory/symmetric_heap.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/bootstrap.hpp"

namespace deep_ep {
namespace {

using cuda::check;
using cuda::CurrentContext;
using cuda::RelaxedCapture;

/// Memory of a GPU that this rank maps, its own or a peer's. The last owner unmaps it.
using Mapped = std::shared_ptr<std::byte>;

class CudaHeap final : public SymmetricHeap {
 public:
  /// `memory`: of each rank; null where this one maps nothing.
  CudaHeap(std::shared_ptr<const cuda::Context> context, std::vector<Mapped> memory, const HeapPlan& plan,
           std::size_t rank)
      : context_(std::move(context)), memory_(std::move(memory)), plan_(plan), rank_(rank) {
    for (const Mapped& one : memory_) peers_.push_back(one.get());
  }

  ~CudaHeap() override {
    cuda::quietly([&] {
      const CurrentContext current(*context_);
      const RelaxedCapture relaxed;
      // Unlike cudaFree, unmapping does not wait for kernels, and tensors in the heap may have died a moment ago.
      cudaDeviceSynchronize();
      if (device_peers_ != nullptr) cudaFree(device_peers_);
      memory_.clear();
    });
  }

  /// Zeros the heap and puts the table of peers where kernels can read it.
  void fill() {
    const int device = context_->device();
    const std::size_t table_bytes = peers().size() * sizeof(std::byte*);
    void* table = nullptr;
    check(cudaMalloc(&table, table_bytes), device, "cudaMalloc of {}", format_bytes(table_bytes));
    device_peers_ = static_cast<std::byte**>(table);
    // A stream of its own: the default stream would wait for, or spoil, what the program does meanwhile.
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), device, "cudaStreamCreateWithFlags");
    const cudaError_t copied = cudaMemcpyAsync(table, peers().data(), table_bytes, cudaMemcpyHostToDevice, stream);
    const cudaError_t zeroed = cudaMemsetAsync(local(), 0, plan_.bytes, stream);
    const cudaError_t finished = cudaStreamSynchronize(stream);
    cudaStreamDestroy(stream);
    check(copied, device, "cudaMemcpyAsync of {}", format_bytes(table_bytes));
    check(zeroed, device, "cudaMemsetAsync of {}", format_bytes(plan_.bytes));
    check(finished, device, "cudaStreamSynchronize");
  }

  std::byte* local() const override { return peers_[rank_]; }
  std::size_t bytes() const override { return plan_.bytes; }
  HeapKind kind() const override { return plan_.kind; }
  std::span<std::byte* const> peers() const override { return peers_; }
  std::byte* const* device_peers() const override { return device_peers_; }

  void unmap_peers() noexcept override {
    cuda::quietly([&] {
      const CurrentContext current(*context_);
      const RelaxedCapture relaxed;
      cudaDeviceSynchronize();
      for (std::size_t rank = 0; rank < memory_.size(); ++rank) {
        if (rank == rank_) continue;
        memory_[rank].reset();
        peers_[rank] = nullptr;
      }
    });
  }

 private:
  std::shared_ptr<const cuda::Context> context_;  // before the memory: it goes last
  std::vector<Mapped> memory_;
  std::vector<std::byte*> peers_;
  HeapPlan plan_;
  std::size_t rank_;
  std::byte** device_peers_ = nullptr;
};

/// What the ranks agreed on before memory is made. The context is current.
struct SharingGroup {
  const cuda::Context& context;
  Bootstrap& bootstrap;
  std::span<const HeapCapabilities> ranks;
  HeapPlan plan;
  double timeout_s;

  std::size_t rank() const { return static_cast<std::size_t>(bootstrap.rank()); }
  std::size_t bytes() const { return plan.bytes; }
};

/// `import_peer(rank)` maps the memory of another rank.
template <class ImportPeer>
std::vector<Mapped> with_peers(const SharingGroup& group, const Mapped& own, const ImportPeer& import_peer) {
  std::vector<Mapped> memory(group.ranks.size());
  agree(group.bootstrap, "mapping the heaps of peers", [&] {
    for (std::size_t peer = 0; peer < memory.size(); ++peer) {
      if (peer == group.rank()) {
        memory[peer] = own;
      } else if (shares_memory(group.plan.kind, group.ranks[group.rank()], group.ranks[peer])) {
        memory[peer] = import_peer(peer);
      }
    }
  });
  return memory;
}

/// Of virtual memory management: `exported` gets the handle that `export_it(memory)` gives.
template <class Handle, class Export>
Mapped make_own(const SharingGroup& group, CUmemAllocationHandleType type, Handle& exported, const Export& export_it) {
  Mapped own;
  agree(group.bootstrap, "allocating the heap", [&] {
    const auto memory = cuda::VmmMemory::create(group.context, group.bytes(), type);
    own = cuda::map(memory, group.bytes());
    exported = export_it(memory);
  });
  return own;
}

/// Inside a host.
std::vector<Mapped> share_by_fd(const SharingGroup& group) {
  UniqueFd exported;
  const Mapped own = make_own(group, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, exported,
                              [](const cuda::VmmMemory& memory) { return memory.export_fd(); });
  std::vector<ProcessIdentity> processes;
  for (const HeapCapabilities& rank : group.ranks) processes.push_back(rank.process);
  const std::vector<UniqueFd> fds = exchange_fds(group.bootstrap, exported.get(), processes, group.timeout_s);
  return with_peers(group, own, [&](std::size_t peer) {
    return cuda::map(cuda::VmmMemory::import(group.context, fds[peer].get()), group.bytes());
  });
}

/// Across hosts.
std::vector<Mapped> share_by_fabric(const SharingGroup& group) {
  FabricHandle exported{};
  const Mapped own = make_own(group, CU_MEM_HANDLE_TYPE_FABRIC, exported,
                              [](const cuda::VmmMemory& memory) { return memory.export_fabric(); });
  const std::vector<FabricHandle> handles = all_gather_values(group.bootstrap, exported);
  return with_peers(group, own, [&](std::size_t peer) {
    return cuda::map(cuda::VmmMemory::import(group.context, handles[peer]), group.bytes());
  });
}

/// From cudaMalloc, through CUDA IPC between processes and as plain pointers inside one.
std::vector<Mapped> share_by_ipc(const SharingGroup& group) {
  struct Exported {
    cudaIpcMemHandle_t handle{};
    std::byte* pointer = nullptr;
  } mine;
  Mapped own;
  const int device = group.context.device();
  agree(group.bootstrap, "allocating the heap", [&] {
    void* memory = nullptr;
    check(cudaMalloc(&memory, group.bytes()), device, "cudaMalloc of {}", format_bytes(group.bytes()));
    own = Mapped(static_cast<std::byte*>(memory), [](std::byte* gone) { cudaFree(gone); });
    mine.pointer = own.get();
    check(cudaIpcGetMemHandle(&mine.handle, mine.pointer), device, "cudaIpcGetMemHandle");
  });
  const std::vector<Exported> exports = all_gather_values(group.bootstrap, mine);
  return with_peers(group, own, [&](std::size_t peer) -> Mapped {
    const HeapCapabilities& rank = group.ranks[peer];
    if (!rank.process.same_process(group.ranks[group.rank()].process)) {
      void* memory = nullptr;
      check(cudaIpcOpenMemHandle(&memory, exports[peer].handle, cudaIpcMemLazyEnablePeerAccess), device,
            "cudaIpcOpenMemHandle of the heap of rank {}", peer);
      return {static_cast<std::byte*>(memory), [](std::byte* gone) { cudaIpcCloseMemHandle(gone); }};
    }
    // A process cannot open a handle that it exported itself; there the pointer works, once access is enabled.
    if (rank.device != device) {
      const cudaError_t result = cudaDeviceEnablePeerAccess(rank.device, 0);
      if (result == cudaErrorPeerAccessAlreadyEnabled) {
        cudaGetLastError();
      } else {
        check(result, device, "cudaDeviceEnablePeerAccess to GPU {} of rank {}", rank.device, peer);
      }
    }
    return {Mapped(), exports[peer].pointer};
  });
}

/// `trial`: a small piece of memory with a fabric handle, kept until peers have tried to map it.
HeapCapabilities query(const cuda::Context& context, const HeapOptions& options,
                       std::optional<cuda::VmmMemory>& trial) {
  HeapCapabilities mine;
  mine.process = this_process();
  mine.device = context.device();
  mine.requested = heap_kind_from_name(environment::choice("DEEP_EP_HEAP"));
  mine.posix_fd = cuda::supports_posix_fd(context);
  mine.bytes = options.bytes;
  // Also for cudaIpc, which shares whole allocations: a smaller heap would take its neighbours along.
  mine.granularity = std::size_t{2} << 20;
  if (mine.posix_fd) {
    mine.granularity = std::max(mine.granularity, cuda::granularity(context, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  }
  if (environment::choice("DEEP_EP_MNNVL") != "off") cuda::try_fabric(context, trial, mine.fabric_trial);
  mine.fabric = trial.has_value();
  if (mine.fabric) {
    mine.granularity = std::max(mine.granularity, cuda::granularity(context, CU_MEM_HANDLE_TYPE_FABRIC));
  }
  return mine;
}

/// GPUs that have fabric handles need not be in one NVLink domain: each rank tries the others' small pieces, so that
/// the heap is made once. Ranks that cannot map one count as ranks without a fabric.
void try_pieces_of_peers(const cuda::Context& context, Bootstrap& bootstrap, std::vector<HeapCapabilities>& ranks) {
  std::array<char, 200> mine{};
  try {
    for (std::size_t peer = 0; peer < ranks.size(); ++peer) {
      if (peer == static_cast<std::size_t>(bootstrap.rank())) continue;
      const cuda::VmmMemory memory = cuda::VmmMemory::import(context, ranks[peer].fabric_trial);
    }
  } catch (const Error& error) {
    std::string(error.what()).copy(mine.data(), mine.size() - 1);
  }
  const std::vector<std::array<char, 200>> all = all_gather_values(bootstrap, mine);
  const auto failed = std::ranges::find_if(all, [](const auto& why) { return why[0] != '\0'; });
  if (failed == all.end()) return;
  log::warn("rank {}: not all ranks can map each other's memory, those of other hosts are left to RDMA: {}",
            bootstrap.rank(), failed->data());
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) ranks[rank].fabric = all[rank][0] == '\0';
}

}  // namespace

std::unique_ptr<SymmetricHeap> make_cuda_heap(std::shared_ptr<const cuda::Context> context, Bootstrap& bootstrap,
                                              const HeapOptions& options) {
  const CurrentContext current(*context);
  const RelaxedCapture relaxed;
  HeapCapabilities mine;
  std::optional<cuda::VmmMemory> trial;
  agree(bootstrap, "asking the GPU how it can share memory", [&] { mine = query(*context, options, trial); });
  std::vector<HeapCapabilities> ranks = all_gather_values(bootstrap, mine);
  HeapPlan plan = plan_heap(ranks, options.bytes_for);
  if (plan.kind == HeapKind::fabric) {
    try_pieces_of_peers(*context, bootstrap, ranks);
    plan = plan_heap(ranks, options.bytes_for);
  }
  const SharingGroup group{*context, bootstrap, ranks, plan, options.timeout_s};
  std::vector<Mapped> memory = plan.kind == HeapKind::fabric     ? share_by_fabric(group)
                               : plan.kind == HeapKind::posix_fd ? share_by_fd(group)
                                                                 : share_by_ipc(group);
  auto heap = std::make_unique<CudaHeap>(context, std::move(memory), plan, group.rank());
  agree(bootstrap, "clearing the heap", [&] { heap->fill(); });
  log::info("rank {}: heap of {} on GPU {}, shared by {}", bootstrap.rank(), format_bytes(plan.bytes),
            context->device(), name_of(plan.kind));
  return heap;
}

}  // namespace deep_ep
