// The memory of a device as a heap uses it: memory that goes to other processes, and addresses at which it is seen.
#pragma once

#include <cstddef>
#include <memory>

#include "csrc/memory/heap_choice.hpp"
#include "csrc/support/unique_fd.hpp"

namespace deep_ep {

namespace cuda {
struct Context;
}

/// Memory without addresses, of this process or of another one. What is attached lives on without this object.
using PhysicalMemory = std::shared_ptr<const void>;

/// By which another process gets physical memory: one of these, as the kind of heap says.
struct SharedMemory {
  std::shared_ptr<const UniqueFd> fd = {};
  FabricHandle fabric = {};
};

/// Of one heap. Sizes are multiples of the granularity.
class HeapMemory {
 public:
  virtual ~HeapMemory() = default;

  /// `trial`: a small piece of memory with a fabric handle, kept until peers have tried to map it; or none.
  virtual HeapCapabilities capabilities(PhysicalMemory& trial) const = 0;

  virtual PhysicalMemory create(std::size_t bytes, HeapKind kind) const = 0;
  virtual SharedMemory share(const PhysicalMemory& memory, HeapKind kind) const = 0;
  virtual PhysicalMemory import(const SharedMemory& shared, HeapKind kind) const = 0;

  /// Addresses, which stay the same while memory comes and goes; what is attached there goes with them.
  virtual std::shared_ptr<std::byte> reserve(std::size_t bytes) const = 0;
  /// The device reads and writes `memory` at `at` from now on.
  virtual void attach(std::byte* at, std::size_t bytes, const PhysicalMemory& memory) const = 0;
  /// Waits for the device's work, and takes away the memory at `at`, if there is any: a failed `attach` may have left a
  /// part.
  virtual void detach(std::byte* at, std::size_t bytes) const noexcept = 0;
};

/// On the CPU: anonymous shared memory, full of zeros, which is allocated when it is touched. Other processes of the
/// host get descriptors of it; ranks of this process use it where its owner has it. `identity` says where the rank
/// lives.
std::shared_ptr<const HeapMemory> make_host_heap_memory(const ProcessIdentity& identity = this_process());

/// On a GPU: CUDA's virtual memory management.
std::shared_ptr<const HeapMemory> make_cuda_heap_memory(std::shared_ptr<const cuda::Context> context);

}  // namespace deep_ep
