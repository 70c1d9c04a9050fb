#include "csrc/memory/cuda_vmm.hpp"

#include <cstdint>
#include <utility>

#include "csrc/executor/cuda/context.hpp"
#include "csrc/executor/cuda/driver.hpp"

namespace deep_ep::cuda {
namespace {

bool has(const Context& context, CUdevice_attribute attribute) {
  int value = 0;
  check(driver().device_get_attribute(&value, attribute, context.driver_device()), context.device(),
        "cuDeviceGetAttribute({})", static_cast<int>(attribute));
  return value != 0;
}

CUmemAllocationProp properties(const Context& context, CUmemAllocationHandleType type) {
  CUmemAllocationProp result{};
  result.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  result.requestedHandleTypes = type;
  result.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  result.location.id = context.driver_device();
  // Requested here, because it cannot be added later, when the heap is registered with a network card.
  result.allocFlags.gpuDirectRDMACapable = has(context, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
  return result;
}

}  // namespace

VmmMemory VmmMemory::create(const Context& context, std::size_t bytes, CUmemAllocationHandleType type) {
  const CUmemAllocationProp wanted = properties(context, type);
  CUmemGenericAllocationHandle handle = 0;
  check(driver().mem_create(&handle, bytes, &wanted, 0), context.device(), "cuMemCreate of {}", format_bytes(bytes));
  return {context, handle};
}

VmmMemory VmmMemory::import(const Context& context, int fd) {
  CUmemGenericAllocationHandle handle = 0;
  // The driver takes the number itself in place of a pointer.
  void* number = reinterpret_cast<void*>(static_cast<std::uintptr_t>(fd));  // NOLINT(performance-no-int-to-ptr)
  check(driver().mem_import(&handle, number, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR), context.device(),
        "cuMemImportFromShareableHandle(POSIX_FILE_DESCRIPTOR)");
  return {context, handle};
}

VmmMemory VmmMemory::at(const Context& context, std::byte* address) {
  CUmemGenericAllocationHandle handle = 0;
  check(driver().mem_retain(&handle, address), context.device(), "cuMemRetainAllocationHandle");
  return {context, handle};
}

VmmMemory VmmMemory::import(const Context& context, const FabricHandle& fabric) {
  CUmemGenericAllocationHandle handle = 0;
  FabricHandle copy = fabric;
  check(driver().mem_import(&handle, copy.data(), CU_MEM_HANDLE_TYPE_FABRIC), context.device(),
        "cuMemImportFromShareableHandle(FABRIC)");
  return {context, handle};
}

VmmMemory::VmmMemory(VmmMemory&& other) noexcept
    : context_(other.context_), handle_(other.handle_), owned_(std::exchange(other.owned_, false)) {}

VmmMemory::~VmmMemory() {
  if (owned_) driver().mem_release(handle_);
}

UniqueFd VmmMemory::export_fd() const {
  int fd = -1;
  check(driver().mem_export(&fd, handle_, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0), context_->device(),
        "cuMemExportToShareableHandle(POSIX_FILE_DESCRIPTOR)");
  return UniqueFd(fd);
}

FabricHandle VmmMemory::export_fabric() const {
  static_assert(sizeof(CUmemFabricHandle) == sizeof(FabricHandle));
  FabricHandle fabric{};
  check(driver().mem_export(fabric.data(), handle_, CU_MEM_HANDLE_TYPE_FABRIC, 0), context_->device(),
        "cuMemExportToShareableHandle(FABRIC)");
  return fabric;
}

Mapping::Mapping(const Context& context, std::size_t bytes) : context_(&context), bytes_(bytes) {
  check(driver().mem_address_reserve(&address_, bytes, 0, 0, 0), context.device(), "cuMemAddressReserve of {}",
        format_bytes(bytes));
}

Mapping::~Mapping() {
  detach();
  driver().mem_address_free(address_, bytes_);
}

void Mapping::attach(const VmmMemory& memory) {
  check(driver().mem_map(address_, bytes_, 0, memory.handle(), 0), context_->device(), "cuMemMap of {}",
        format_bytes(bytes_));
  attached_ = true;
  CUmemAccessDesc access{};
  access.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
  access.location.id = context_->driver_device();
  access.flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
  check(driver().mem_set_access(address_, bytes_, &access, 1), context_->device(), "cuMemSetAccess of {}",
        format_bytes(bytes_));
}

void Mapping::detach() noexcept {
  if (std::exchange(attached_, false)) driver().mem_unmap(address_, bytes_);
}

std::byte* Mapping::get() const {
  return reinterpret_cast<std::byte*>(address_);  // NOLINT(performance-no-int-to-ptr)
}

std::size_t granularity(const Context& context, CUmemAllocationHandleType type) {
  const CUmemAllocationProp wanted = properties(context, type);
  std::size_t bytes = 0;
  check(driver().mem_get_granularity(&bytes, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED), context.device(),
        "cuMemGetAllocationGranularity");
  return bytes;
}

bool supports_posix_fd(const Context& context) {
  return has(context, CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) &&
         has(context, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
}

void try_fabric(const Context& context, std::optional<VmmMemory>& piece, FabricHandle& handle) {
  try {
    if (!has(context, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)) return;
    const std::size_t bytes = granularity(context, CU_MEM_HANDLE_TYPE_FABRIC);
    piece.emplace(VmmMemory::create(context, bytes, CU_MEM_HANDLE_TYPE_FABRIC));
    handle = piece->export_fabric();
  } catch (const Error&) {
    piece.reset();  // an older driver, or no permission to use the fabric
  }
}

}  // namespace deep_ep::cuda
