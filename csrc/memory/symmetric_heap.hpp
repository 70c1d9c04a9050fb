// Memory of equal size on every rank, mapped by every rank of the NVLink domain: offset o of rank r is peers()[r] + o.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "csrc/memory/process_identity.hpp"

namespace deep_ep {

class Bootstrap;
namespace cuda {
class Context;
}

enum class HeapKind : std::uint8_t { posix_fd, fabric };

struct HeapOptions {
  std::size_t bytes = 0;  ///< rounded up to the allocation granularity; equal on all ranks
  /// Instead of `bytes`, where they depend on which ranks will share memory. `domains`: of each rank the lowest rank
  /// that it shares memory with. Asked before memory is made, and again where memory cannot be shared so widely.
  std::function<std::size_t(std::span<const int> domains)> bytes_for = {};
  double timeout_s = 100;  ///< for exchanging the exports
};

/// Created and destroyed collectively (Backend::create_heap). Each rank fills its own with zeroes before it returns;
/// peers may write there after the next exchange of the ranks.
class SymmetricHeap {
 public:
  virtual ~SymmetricHeap() = default;

  virtual std::byte* local() const = 0;
  virtual std::size_t bytes() const = 0;
  virtual HeapKind kind() const = 0;

  /// The heap of every rank, this one included, as this process maps it. Null for ranks that share no memory with this
  /// one (ranks of other hosts, unless there is a fabric between them).
  virtual std::span<std::byte* const> peers() const = 0;
  /// The same table in memory that kernels of this rank may read.
  virtual std::byte* const* device_peers() const = 0;

  bool contains(const void* pointer, std::size_t bytes_wanted = 1) const {
    const auto* begin = static_cast<const std::byte*>(pointer);
    return begin >= local() && begin + bytes_wanted <= local() + bytes();
  }
  std::uint64_t offset_of(const void* pointer) const {
    return static_cast<std::uint64_t>(static_cast<const std::byte*>(pointer) - local());
  }

  /// Unmaps what belongs to peers, so that their owners may free it after a barrier. Idempotent.
  virtual void unmap_peers() noexcept = 0;

  /// Collective, when no rank uses memory of another one: the host keeps what the heap holds. If it throws, on all
  /// ranks, nothing has changed. @throws OutOfMemory if the host has no room.
  virtual void keep(Bootstrap& bootstrap) = 0;
  /// After keep, by each rank: the memory goes back to the system when all ranks have called it. peers() stay.
  virtual void release_memory() noexcept = 0;
  /// Collective: memory at the same addresses, with what it held. If it throws, on all ranks, the heap stays suspended.
  virtual void resume(Bootstrap& bootstrap) = 0;

  /// Collective, while no rank uses memory of another one: with new processes, which make a heap of as many bytes, in
  /// the place of the ranks with `is_new`. Their memory is mapped where that of the ranks before them was. If it
  /// throws, nothing of the other ranks has changed. @throws Unsupported where addresses cannot be kept.
  virtual void admit(Bootstrap& bootstrap, const std::vector<bool>& is_new) = 0;
};

/// On the CPU: anonymous shared memory. Collective. Ranks of the same process see a peer's heap at the address where
/// its owner has it (ThreadSanitizer compares addresses); other processes of the host get descriptors of it, through
/// sockets of their network namespace; other hosts do not map it. Memory is allocated when it is touched. `identity`
/// says where this rank lives.
std::unique_ptr<SymmetricHeap> make_host_heap(Bootstrap& bootstrap, const HeapOptions& options,
                                              const ProcessIdentity& identity = this_process());

/// On GPUs: heap_choice.hpp says which way of sharing memory is used when. Collective. If it fails on one rank, it
/// throws there, and on the others before their next exchange ends.
std::unique_ptr<SymmetricHeap> make_cuda_heap(std::shared_ptr<const cuda::Context> context, Bootstrap& bootstrap,
                                              const HeapOptions& options);

}  // namespace deep_ep
