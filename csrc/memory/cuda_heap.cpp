#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <memory>

#include "csrc/executor/cuda/context.hpp"
#include "csrc/executor/cuda/driver.hpp"
#include "csrc/memory/heap_memory.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep {
namespace {

using cuda::driver;
using cuda::RelaxedContext;

/// File descriptors, or fabric handles, which other hosts can take.
constexpr CUmemAllocationHandleType type_of(HeapKind kind) {
  return kind == HeapKind::fabric ? CU_MEM_HANDLE_TYPE_FABRIC : CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
}

CUdeviceptr address(const std::byte* at) { return reinterpret_cast<CUdeviceptr>(at); }

CUmemGenericAllocationHandle handle_of(const PhysicalMemory& memory) {
  return reinterpret_cast<CUmemGenericAllocationHandle>(memory.get());
}

PhysicalMemory own(CUmemGenericAllocationHandle handle) {
  return {reinterpret_cast<const void*>(handle),  // NOLINT(performance-no-int-to-ptr)
          [](const void* gone) { driver().mem_release(reinterpret_cast<CUmemGenericAllocationHandle>(gone)); }};
}

class CudaHeapMemory final : public HeapMemory {
 public:
  explicit CudaHeapMemory(std::shared_ptr<const cuda::Context> context) : context_(std::move(context)) {}

  HeapCapabilities capabilities(PhysicalMemory& trial) const override {
    const RelaxedContext current(*context_);
    HeapCapabilities mine;
    mine.process = this_process();
    mine.device = context_->device;
    mine.posix_fd = has(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) &&
                    has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
    if (mine.posix_fd) mine.granularity = granularity(HeapKind::posix_fd);
    if (environment::text("DEEP_EP_MNNVL") == "off") return mine;
    try {
      // The attribute is also set on machines without a fabric service, so only a piece of memory tells.
      if (!has(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)) return mine;
      const std::size_t bytes = granularity(HeapKind::fabric);
      trial = create(bytes, HeapKind::fabric);
      mine.fabric_trial = share(trial, HeapKind::fabric).fabric;
      mine.granularity = std::max<std::uint64_t>(mine.granularity, bytes);
      mine.fabric = true;
    } catch (const Error&) {
      trial = nullptr;  // an older driver, or no permission to use the fabric
    }
    return mine;
  }

  PhysicalMemory create(std::size_t bytes, HeapKind kind) const override {
    const RelaxedContext current(*context_);
    const CUmemAllocationProp wanted = properties(kind);
    CUmemGenericAllocationHandle handle = 0;
    check(driver().mem_create(&handle, bytes, &wanted, 0), "cuMemCreate of {}", format_bytes(bytes));
    return own(handle);
  }

  SharedMemory share(const PhysicalMemory& memory, HeapKind kind) const override {
    static_assert(sizeof(CUmemFabricHandle) == sizeof(FabricHandle));
    const RelaxedContext current(*context_);
    SharedMemory shared;
    int fd = -1;
    void* const place = kind == HeapKind::fabric ? static_cast<void*>(shared.fabric.data()) : &fd;
    check(driver().mem_export(place, handle_of(memory), type_of(kind), 0), "cuMemExportToShareableHandle({})",
          name_of(kind));
    if (kind != HeapKind::fabric) shared.fd = std::make_shared<UniqueFd>(fd);
    return shared;
  }

  PhysicalMemory import(const SharedMemory& shared, HeapKind kind) const override {
    const RelaxedContext current(*context_);
    FabricHandle fabric = shared.fabric;
    void* place = fabric.data();
    if (kind != HeapKind::fabric) {
      // The driver takes the number itself in place of a pointer.
      const auto number = static_cast<std::uintptr_t>(shared.fd->get());
      place = reinterpret_cast<void*>(number);  // NOLINT(performance-no-int-to-ptr)
    }
    CUmemGenericAllocationHandle handle = 0;
    check(driver().mem_import(&handle, place, type_of(kind)), "cuMemImportFromShareableHandle({})", name_of(kind));
    return own(handle);
  }

  std::shared_ptr<std::byte> reserve(std::size_t bytes) const override {
    const RelaxedContext current(*context_);
    CUdeviceptr reserved = 0;
    check(driver().mem_address_reserve(&reserved, bytes, 0, 0, 0), "cuMemAddressReserve of {}", format_bytes(bytes));
    return {reinterpret_cast<std::byte*>(reserved),  // NOLINT(performance-no-int-to-ptr)
            [memory = *this, bytes](std::byte* begin) {
              memory.detach(begin, bytes);
              log::quietly([&] {
                const RelaxedContext of_memory(*memory.context_);
                driver().mem_address_free(address(begin), bytes);
              });
            }};
  }

  void attach(std::byte* at, std::size_t bytes, const PhysicalMemory& memory) const override {
    const RelaxedContext current(*context_);
    check(driver().mem_map(address(at), bytes, 0, handle_of(memory), 0), "cuMemMap of {}", format_bytes(bytes));
    CUmemAccessDesc access{};
    access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    access.location.id = context_->driver_device;
    access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    check(driver().mem_set_access(address(at), bytes, &access, 1), "cuMemSetAccess of {}", format_bytes(bytes));
  }
  void detach(std::byte* at, std::size_t bytes) const noexcept override {
    log::quietly([&] {
      const RelaxedContext current(*context_);
      // Unlike cudaFree, unmapping does not wait for kernels, and tensors in the heap may have died a moment ago.
      cudaDeviceSynchronize();
      driver().mem_unmap(address(at), bytes);
    });
  }

 private:
  template <class... Args>
  void check(CUresult result, fmt::format_string<Args...> call, Args&&... args) const {
    cuda::check(result, context_->device, call, std::forward<Args>(args)...);
  }

  bool has(CUdevice_attribute attribute) const {
    int value = 0;
    check(driver().device_get_attribute(&value, attribute, context_->driver_device), "cuDeviceGetAttribute({})",
          static_cast<int>(attribute));
    return value != 0;
  }

  CUmemAllocationProp properties(HeapKind kind) const {
    CUmemAllocationProp result{};
    result.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    result.requestedHandleTypes = type_of(kind);
    result.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    result.location.id = context_->driver_device;
    // Requested here, because it cannot be added later, when the heap is registered with a network card.
    result.allocFlags.gpuDirectRDMACapable = has(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
    return result;
  }

  /// Sizes are multiples of this.
  std::size_t granularity(HeapKind kind) const {
    const CUmemAllocationProp wanted = properties(kind);
    std::size_t bytes = 0;
    check(driver().mem_get_granularity(&bytes, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED),
          "cuMemGetAllocationGranularity");
    return bytes;
  }

  std::shared_ptr<const cuda::Context> context_;
};

}  // namespace

std::shared_ptr<const HeapMemory> make_cuda_heap_memory(std::shared_ptr<const cuda::Context> context) {
  return std::make_shared<CudaHeapMemory>(std::move(context));
}

}  // namespace deep_ep
