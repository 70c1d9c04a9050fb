#include "csrc/memory/cuda_heap.hpp"

#include <cuda_runtime_api.h>

#include <algorithm>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/executor/cuda/check.hpp"
#include "csrc/memory/cuda_shared_memory.hpp"
#include "csrc/memory/cuda_vmm.hpp"
#include "csrc/memory/heap_choice.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep {
namespace {

using cuda::check;
using cuda::CurrentContext;
using cuda::RelaxedCapture;

class CudaHeap final : public SymmetricHeap {
 public:
  CudaHeap(std::shared_ptr<const cuda::Context> context, std::unique_ptr<CudaSharedMemory> memory, const HeapPlan& plan,
           std::size_t rank)
      : context_(std::move(context)), memory_(std::move(memory)), plan_(plan), rank_(rank) {}

  ~CudaHeap() override {
    cuda::quietly([&] {
      const CurrentContext current(*context_);
      const RelaxedCapture relaxed;
      // Unlike cudaFree, unmapping does not wait for kernels, and tensors in the heap may have died a moment ago.
      cudaDeviceSynchronize();
      if (device_peers_ != nullptr) cudaFree(device_peers_);
      memory_.reset();
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

  std::byte* local() const override { return memory_->peers()[rank_]; }
  std::size_t bytes() const override { return plan_.bytes; }
  HeapKind kind() const override { return plan_.kind; }
  std::span<std::byte* const> peers() const override { return memory_->peers(); }
  std::byte* const* device_peers() const override { return device_peers_; }

  void unmap_peers() noexcept override {
    cuda::quietly([&] {
      const CurrentContext current(*context_);
      const RelaxedCapture relaxed;
      cudaDeviceSynchronize();
      memory_->unmap_peers();
    });
  }

 private:
  std::shared_ptr<const cuda::Context> context_;
  std::unique_ptr<CudaSharedMemory> memory_;
  HeapPlan plan_;
  std::size_t rank_;
  std::byte** device_peers_ = nullptr;
};

HeapCapabilities query(const cuda::Context& context, const HeapOptions& options) {
  HeapCapabilities mine;
  mine.process = this_process();
  mine.device = context.device();
  mine.requested =
      options.kind != HeapKind::automatic ? options.kind : heap_kind_from_name(environment::choice("DEEP_EP_HEAP"));
  mine.posix_fd = cuda::supports_posix_fd(context);
  mine.fabric = environment::choice("DEEP_EP_MNNVL") != "off" && cuda::supports_fabric(context);
  mine.bytes = options.bytes;
  // Also for cudaIpc, which shares whole allocations: a smaller heap would take its neighbours along.
  mine.granularity = std::size_t{2} << 20;
  if (mine.posix_fd) {
    mine.granularity = std::max(mine.granularity, cuda::granularity(context, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  }
  if (mine.fabric) {
    mine.granularity = std::max(mine.granularity, cuda::granularity(context, CU_MEM_HANDLE_TYPE_FABRIC));
  }
  return mine;
}

/// The kind first: it says which ranks share memory, and that may say how much.
HeapPlan plan_with_size(std::vector<HeapCapabilities>& ranks, const HeapOptions& options) {
  const HeapPlan plan = plan_heap(ranks);
  if (!options.bytes_for) return plan;
  const std::size_t bytes = options.bytes_for(memory_domains(plan.kind, ranks));
  for (HeapCapabilities& rank : ranks) rank.bytes = bytes;
  return plan_heap(ranks);
}

std::unique_ptr<CudaSharedMemory> share(const CudaSharingGroup& group) {
  return group.plan.kind == HeapKind::cuda_ipc ? make_ipc_shared_memory(group) : make_vmm_shared_memory(group);
}

}  // namespace

std::unique_ptr<SymmetricHeap> make_cuda_heap(std::shared_ptr<const cuda::Context> context, Bootstrap& bootstrap,
                                              const HeapOptions& options) {
  const CurrentContext current(*context);
  const RelaxedCapture relaxed;
  HeapCapabilities mine;
  agree(bootstrap, "asking the GPU how it can share memory", [&] { mine = query(*context, options); });
  std::vector<HeapCapabilities> ranks = all_gather_values(bootstrap, mine);
  CudaSharingGroup group{.context = context,
                         .bootstrap = &bootstrap,
                         .ranks = ranks,
                         .plan = plan_with_size(ranks, options),
                         .timeout_s = options.timeout_s};
  std::unique_ptr<CudaSharedMemory> memory;
  try {
    memory = share(group);
    if (group.plan.kind == HeapKind::fabric) bootstrap.barrier();  // where it failed on a rank, it fails here on all
  } catch (const Error& error) {
    // On all ranks alike: one that found no memory must come to the next exchange, or the others wait for it. GPUs that
    // have fabric handles need not be in one NVLink domain.
    if (group.plan.kind != HeapKind::fabric || mine.requested != HeapKind::automatic) throw;
    log::warn("rank {}: not all ranks can map each other's memory, those of other hosts are left to RDMA: {}",
              bootstrap.rank(), error.what());
    memory.reset();  // there may not be room for both
    for (HeapCapabilities& rank : ranks) rank.fabric = false;
    group.plan = plan_with_size(ranks, options);
    memory = share(group);
  }
  auto heap = std::make_unique<CudaHeap>(context, std::move(memory), group.plan, group.rank());
  agree(bootstrap, "clearing the heap", [&] { heap->fill(); });
  log::info("rank {}: heap of {} on GPU {}, shared by {}", bootstrap.rank(), format_bytes(group.plan.bytes),
            context->device(), name_of(group.plan.kind));
  return heap;
}

}  // namespace deep_ep
