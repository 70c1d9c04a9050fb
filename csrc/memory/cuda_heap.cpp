// The symmetric heap on GPUs: two ways to share memory.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/executor/cuda/context.hpp"
#include "csrc/executor/cuda/driver.hpp"
#include "csrc/memory/fd_exchange.hpp"
#include "csrc/memory/heap_choice.hpp"
#include "csrc/memory/symmetric_heap.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/logging.hpp"
#include "csrc/support/unique_fd.hpp"
#include "deep_ep/bootstrap.hpp"

namespace deep_ep {
namespace {

using cuda::check;
using cuda::Context;
using cuda::driver;
using cuda::RelaxedContext;

// Virtual memory management: physical memory, the ways to other processes, mappings.

/// Physical memory, of this process or imported. A mapping keeps it alive without this object.
using Memory = std::shared_ptr<const CUmemGenericAllocationHandle>;

Memory own(CUmemGenericAllocationHandle handle) {
  return {new CUmemGenericAllocationHandle(handle), [](const CUmemGenericAllocationHandle* gone) {
            driver().mem_release(*gone);
            delete gone;
          }};
}

bool has(const Context& context, CUdevice_attribute attribute) {
  int value = 0;
  check(driver().device_get_attribute(&value, attribute, context.driver_device()), context.device(),
        "cuDeviceGetAttribute({})", static_cast<int>(attribute));
  return value != 0;
}

/// A way by which memory goes to other processes: by file descriptors, or by fabric handles, which other hosts can
/// take.
struct Way {
  CUmemAllocationHandleType type;
  const char* name;
};
constexpr Way kDescriptor = {CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, "POSIX_FILE_DESCRIPTOR"};
constexpr Way kFabric = {CU_MEM_HANDLE_TYPE_FABRIC, "FABRIC"};

CUmemAllocationProp properties(const Context& context, const Way& way) {
  CUmemAllocationProp result{};
  result.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  result.requestedHandleTypes = way.type;
  result.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  result.location.id = context.driver_device();
  // Requested here, because it cannot be added later, when the heap is registered with a network card.
  result.allocFlags.gpuDirectRDMACapable = has(context, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
  return result;
}

/// What sizes must be a multiple of.
std::size_t granularity(const Context& context, const Way& way) {
  const CUmemAllocationProp wanted = properties(context, way);
  std::size_t bytes = 0;
  check(driver().mem_get_granularity(&bytes, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED), context.device(),
        "cuMemGetAllocationGranularity");
  return bytes;
}

Memory create(const Context& context, std::size_t bytes, const Way& way) {
  const CUmemAllocationProp wanted = properties(context, way);
  CUmemGenericAllocationHandle handle = 0;
  check(driver().mem_create(&handle, bytes, &wanted, 0), context.device(), "cuMemCreate of {}", format_bytes(bytes));
  return own(handle);
}

/// The memory that this process has mapped at `address`.
Memory mapped_at(const Context& context, std::byte* address) {
  CUmemGenericAllocationHandle handle = 0;
  check(driver().mem_retain(&handle, address), context.device(), "cuMemRetainAllocationHandle");
  return own(handle);
}

/// `shared`: as the driver has it for this way.
Memory import(const Context& context, const Way& way, void* shared) {
  CUmemGenericAllocationHandle handle = 0;
  check(driver().mem_import(&handle, shared, way.type), context.device(), "cuMemImportFromShareableHandle({})",
        way.name);
  return own(handle);
}
Memory import(const Context& context, const UniqueFd& fd) {
  // The driver takes the number itself in place of a pointer.
  const auto number = static_cast<std::uintptr_t>(fd.get());
  return import(context, kDescriptor, reinterpret_cast<void*>(number));  // NOLINT(performance-no-int-to-ptr)
}
Memory import(const Context& context, FabricHandle handle) { return import(context, kFabric, handle.data()); }

void export_to(void* shared, const Context& context, const Memory& memory, const Way& way) {
  check(driver().mem_export(shared, *memory, way.type, 0), context.device(), "cuMemExportToShareableHandle({})",
        way.name);
}
UniqueFd export_fd(const Context& context, const Memory& memory) {
  int fd = -1;
  export_to(&fd, context, memory, kDescriptor);
  return UniqueFd(fd);
}
FabricHandle export_fabric(const Context& context, const Memory& memory) {
  static_assert(sizeof(CUmemFabricHandle) == sizeof(FabricHandle));
  FabricHandle handle{};
  export_to(handle.data(), context, memory, kFabric);
  return handle;
}

/// Addresses at which this GPU reads and writes memory. They stay the same while memory comes and goes.
class Mapping {
 public:
  Mapping(const Context& context, std::size_t bytes) : context_(context), bytes_(bytes) {
    check(driver().mem_address_reserve(&address_, bytes, 0, 0, 0), context.device(), "cuMemAddressReserve of {}",
          format_bytes(bytes));
  }
  ~Mapping() {
    detach();
    driver().mem_address_free(address_, bytes_);
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

  void attach(const Memory& memory) {
    check(driver().mem_map(address_, bytes_, 0, *memory, 0), context_.device(), "cuMemMap of {}", format_bytes(bytes_));
    attached_ = true;
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = context_.driver_device();
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    check(driver().mem_set_access(address_, bytes_, &access, 1), context_.device(), "cuMemSetAccess of {}",
          format_bytes(bytes_));
  }
  void detach() noexcept {
    if (std::exchange(attached_, false)) driver().mem_unmap(address_, bytes_);
  }
  std::byte* get() const { return reinterpret_cast<std::byte*>(address_); }  // NOLINT(performance-no-int-to-ptr)

 private:
  const Context& context_;
  CUdeviceptr address_ = 0;
  std::size_t bytes_;
  bool attached_ = false;
};

/// The facts of all ranks, on which they agree before they make memory.
struct SharingGroup {
  std::vector<HeapCapabilities> ranks;
  HeapPlan plan;
  std::size_t rank;
  double timeout_s;

  bool shares_with(std::size_t peer) const {
    return peer == rank || shares_memory(plan.kind, ranks[rank], ranks[peer]);
  }
};

class CudaHeap final : public SymmetricHeap {
 public:
  /// Collective. The context is current.
  CudaHeap(std::shared_ptr<const Context> context, SharingGroup group, Bootstrap& bootstrap)
      : context_(std::move(context)), group_(std::move(group)), peers_(group_.ranks.size()) {
    agree(bootstrap, "reserving addresses for the heap", [&] { reserve(); });
    attach(bootstrap);
    agree(bootstrap, "clearing the heap", [&] { fill(); });
  }

  ~CudaHeap() override {
    cuda::quietly([&] {
      const RelaxedContext current(*context_);
      // Unlike cudaFree, unmapping does not wait for kernels, and tensors in the heap may have died a moment ago.
      cudaDeviceSynchronize();
      device_peers_.reset();
      mappings_.clear();
    });
  }

  std::byte* local() const override { return peers_[group_.rank]; }
  std::size_t bytes() const override { return group_.plan.bytes; }
  HeapKind kind() const override { return group_.plan.kind; }
  std::span<std::byte* const> peers() const override { return peers_; }
  std::byte* const* device_peers() const override { return device_peers_.get(); }

  void unmap_peers() noexcept override {
    cuda::quietly([&] {
      const RelaxedContext current(*context_);
      cudaDeviceSynchronize();
      for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
        if (rank == group_.rank) continue;
        mappings_[rank].reset();
        peers_[rank] = nullptr;
      }
    });
  }

  void keep(Bootstrap& bootstrap) override {
    const RelaxedContext current(*context_);
    try {
      agree(bootstrap, "keeping what the heap holds", [&] {
        kept_.reset(new (std::nothrow) std::byte[bytes()]);
        if (kept_ == nullptr) {
          fail<OutOfMemory>("suspend: the host has no {} for what the heap holds", format_bytes(bytes()));
        }
        copy(kept_.get(), local(), cudaMemcpyDeviceToHost);
      });
      bootstrap.barrier();
    } catch (...) {
      kept_.reset();
      throw;
    }
  }

  void release_memory() noexcept override {
    cuda::quietly([&] {
      const RelaxedContext current(*context_);
      detach();
    });
  }

  void resume(Bootstrap& bootstrap) override {
    const RelaxedContext current(*context_);
    try {
      attach(bootstrap);
      agree(bootstrap, "filling the heap again", [&] { copy(local(), kept_.get(), cudaMemcpyHostToDevice); });
      bootstrap.barrier();
    } catch (...) {
      detach();
      throw;
    }
    kept_.reset();
  }

  /// The same exchanges as of make_cuda_heap and attach() with descriptors.
  void admit(Bootstrap& bootstrap, const std::vector<bool>& is_new) override {
    const RelaxedContext current(*context_);
    SharingGroup next = group_;
    next.ranks = all_gather_values(bootstrap, group_.ranks[group_.rank]);
    UniqueFd fd;
    agree(bootstrap, "offering the heap to new processes", [&] {
      const HeapPlan plan = plan_heap(next.ranks, {.bytes = bytes()});
      if (kind() != HeapKind::posix_fd || plan.kind != kind() || plan.bytes != bytes()) {
        fail<Unsupported>("replace_ranks: the heaps of {} are shared by {}, with the new ranks by {}, allowed: {}",
                          format_bytes(bytes()), name_of(kind()), name_of(plan.kind), name_of(HeapKind::posix_fd));
      }
      fd = export_fd(*context_, mapped_at(*context_, local()));
    });
    const std::vector<UniqueFd> fds = exchange_fds(bootstrap, fd.get(), is_new, group_.timeout_s);
    agree(bootstrap, "mapping the heaps of new processes", [&] {
      std::vector<Memory> imported(peers_.size());  // all before anything is unmapped
      for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
        if (is_new[peer]) imported[peer] = import(*context_, fds[peer]);
      }
      cudaDeviceSynchronize();
      for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
        if (imported[peer] == nullptr) continue;
        mappings_[peer]->detach();
        mappings_[peer]->attach(imported[peer]);
      }
      group_ = next;
    });
  }

 private:
  void reserve() {
    mappings_.resize(peers_.size());
    for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
      if (!group_.shares_with(peer)) continue;
      mappings_[peer] = std::make_unique<Mapping>(*context_, bytes());
      peers_[peer] = mappings_[peer]->get();
    }
  }

  /// Collective: new memory of each rank, where all ranks that share it have reserved addresses.
  void attach(Bootstrap& bootstrap) {
    const bool by_fd = kind() == HeapKind::posix_fd;
    UniqueFd fd;
    FabricHandle handle{};
    agree(bootstrap, "allocating the heap", [&] {
      const Memory memory = create(*context_, bytes(), by_fd ? kDescriptor : kFabric);
      mappings_[group_.rank]->attach(memory);
      if (by_fd) {
        fd = export_fd(*context_, memory);
      } else {
        handle = export_fabric(*context_, memory);
      }
    });
    std::vector<UniqueFd> fds;
    std::vector<FabricHandle> handles;
    if (by_fd) {
      std::vector<bool> partners;
      for (std::size_t peer = 0; peer < peers_.size(); ++peer) partners.push_back(group_.shares_with(peer));
      fds = exchange_fds(bootstrap, fd.get(), partners, group_.timeout_s);
    } else {
      handles = all_gather_values(bootstrap, handle);
    }
    agree(bootstrap, "mapping the heaps of peers", [&] {
      for (std::size_t peer = 0; peer < peers_.size(); ++peer) {
        if (peer == group_.rank || !group_.shares_with(peer)) continue;
        mappings_[peer]->attach(by_fd ? import(*context_, fds[peer]) : import(*context_, handles[peer]));
      }
    });
  }

  void detach() noexcept {
    cudaDeviceSynchronize();
    for (const auto& mapping : mappings_) {
      if (mapping) mapping->detach();
    }
  }

  /// Zeros the heap and puts the table of peers where kernels can read it.
  void fill() {
    const std::size_t table_bytes = peers_.size() * sizeof(std::byte*);
    void* table = nullptr;
    check(cudaMalloc(&table, table_bytes), context_->device(), "cudaMalloc of {}", format_bytes(table_bytes));
    device_peers_ = {static_cast<std::byte**>(table), [](std::byte** gone) { cudaFree(gone); }};
    on_own_stream([&](cudaStream_t stream) {
      check(cudaMemcpyAsync(table, peers_.data(), table_bytes, cudaMemcpyHostToDevice, stream), context_->device(),
            "cudaMemcpyAsync of {}", format_bytes(table_bytes));
      check(cudaMemsetAsync(local(), 0, bytes(), stream), context_->device(), "cudaMemsetAsync of {}",
            format_bytes(bytes()));
    });
  }

  void copy(void* to, const void* from, cudaMemcpyKind direction) const {
    on_own_stream([&](cudaStream_t stream) {
      check(cudaMemcpyAsync(to, from, bytes(), direction, stream), context_->device(), "cudaMemcpyAsync of {}",
            format_bytes(bytes()));
    });
  }

  /// `enqueue(stream)`, and the host waits. The default stream would wait for, or spoil, what the program does
  /// meanwhile.
  template <class Enqueue>
  void on_own_stream(const Enqueue& enqueue) const {
    cudaStream_t stream = nullptr;
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), context_->device(), "cudaStreamCreateWithFlags");
    const std::shared_ptr<CUstream_st> owned(stream, [](cudaStream_t gone) {
      cudaStreamSynchronize(gone);
      cudaStreamDestroy(gone);
    });
    enqueue(stream);
    check(cudaStreamSynchronize(stream), context_->device(), "cudaStreamSynchronize");
  }

  std::shared_ptr<const Context> context_;  // before the memory: it goes last
  SharingGroup group_;
  std::vector<std::unique_ptr<Mapping>> mappings_;  ///< of each rank; null where this one maps nothing
  std::vector<std::byte*> peers_;
  std::shared_ptr<std::byte*> device_peers_;
  std::unique_ptr<std::byte[]> kept_;  ///< what a suspended heap holds
};

/// `trial`: a small piece of memory with a fabric handle, kept until peers have tried to map it. None where that is
/// impossible: the device attribute is also set on machines without a fabric service.
HeapCapabilities query(const Context& context, Memory& trial) {
  HeapCapabilities mine;
  mine.process = this_process();
  mine.device = context.device();
  mine.posix_fd = has(context, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) &&
                  has(context, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
  if (mine.posix_fd) mine.granularity = granularity(context, kDescriptor);
  if (environment::choice("DEEP_EP_MNNVL") == "off") return mine;
  try {
    if (!has(context, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)) return mine;
    const std::size_t bytes = granularity(context, kFabric);
    trial = create(context, bytes, kFabric);
    mine.fabric_trial = export_fabric(context, trial);
    mine.granularity = std::max<std::uint64_t>(mine.granularity, bytes);
    mine.fabric = true;
  } catch (const Error&) {
    trial = nullptr;  // an older driver, or no permission to use the fabric
  }
  return mine;
}

/// GPUs that have fabric handles need not be in one NVLink domain: each rank tries the others' small pieces, so that
/// the heap is made once. Ranks that cannot map one count as ranks without a fabric.
void try_pieces_of_peers(const Context& context, Bootstrap& bootstrap, std::vector<HeapCapabilities>& ranks) {
  std::array<char, 200> mine{};
  try {
    for (std::size_t peer = 0; peer < ranks.size(); ++peer) {
      if (peer == static_cast<std::size_t>(bootstrap.rank())) continue;
      import(context, ranks[peer].fabric_trial);
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

std::unique_ptr<SymmetricHeap> make_cuda_heap(std::shared_ptr<const Context> context, Bootstrap& bootstrap,
                                              const HeapOptions& options) {
  const RelaxedContext current(*context);
  HeapCapabilities mine;
  Memory trial;
  agree(bootstrap, "asking the GPU how it can share memory", [&] { mine = query(*context, trial); });
  std::vector<HeapCapabilities> ranks = all_gather_values(bootstrap, mine);
  HeapPlan plan = plan_heap(ranks, options);
  if (plan.kind == HeapKind::fabric) {
    try_pieces_of_peers(*context, bootstrap, ranks);
    plan = plan_heap(ranks, options);
  }
  const auto rank = static_cast<std::size_t>(bootstrap.rank());
  auto heap = std::make_unique<CudaHeap>(context, SharingGroup{ranks, plan, rank, options.timeout_s}, bootstrap);
  log::info("rank {}: heap of {} on GPU {}, shared by {}", bootstrap.rank(), format_bytes(plan.bytes),
            context->device(), name_of(plan.kind));
  return heap;
}

}  // namespace deep_ep
