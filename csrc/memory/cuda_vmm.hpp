// CUDA virtual memory management as objects: physical memory, its mappings, its exports.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <memory>
#include <optional>

#include "csrc/executor/cuda/context.hpp"
#include "csrc/memory/heap_choice.hpp"
#include "csrc/support/unique_fd.hpp"

namespace deep_ep::cuda {

/// Physical memory of a GPU, of this process or imported. A mapping keeps it alive without this object.
class VmmMemory {
 public:
  /// `bytes`: a multiple of granularity(). Usable by RDMA devices where the GPU supports that.
  static VmmMemory create(const Context& context, std::size_t bytes, CUmemAllocationHandleType type);
  /// The memory that this process has mapped at `address`.
  static VmmMemory at(const Context& context, std::byte* address);
  static VmmMemory import(const Context& context, int fd);
  static VmmMemory import(const Context& context, const FabricHandle& handle);

  VmmMemory(VmmMemory&& other) noexcept;
  VmmMemory& operator=(VmmMemory&&) = delete;
  ~VmmMemory();

  UniqueFd export_fd() const;
  FabricHandle export_fabric() const;

  CUmemGenericAllocationHandle handle() const { return handle_; }
  const Context& context() const { return *context_; }

 private:
  VmmMemory(const Context& context, CUmemGenericAllocationHandle handle) : context_(&context), handle_(handle) {}

  const Context* context_;
  CUmemGenericAllocationHandle handle_;
  bool owned_ = true;
};

/// Addresses at which this GPU reads and writes memory. They stay the same while memory comes and goes.
class Mapping {
 public:
  Mapping(const Context& context, std::size_t bytes);
  ~Mapping();
  Mapping(const Mapping&) = delete;

  void attach(const VmmMemory& memory);
  void detach() noexcept;
  std::byte* get() const;

 private:
  const Context* context_;
  CUdeviceptr address_ = 0;
  std::size_t bytes_;
  bool attached_ = false;
};

/// What sizes must be a multiple of.
std::size_t granularity(const Context& context, CUmemAllocationHandleType type);
bool supports_posix_fd(const Context& context);
/// Makes a small piece of memory with a fabric handle, `handle`. None where that is impossible: the device attribute is
/// also set on machines without a fabric service.
void try_fabric(const Context& context, std::optional<VmmMemory>& piece, FabricHandle& handle);

}  // namespace deep_ep::cuda
