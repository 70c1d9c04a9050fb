// Memory of equal size on every rank, mapped by every rank of the NVLink domain: offset o of rank r is peers()[r] + o.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "csrc/memory/heap_choice.hpp"
#include "csrc/memory/heap_memory.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep {

/// Each rank fills its own with zeroes before it returns from the constructor; peers may write there after the next
/// exchange of the ranks.
class SymmetricHeap {
 public:
  /// Collective, as all below that have a bootstrap; heap_choice.hpp says which way of sharing memory is used when. A
  /// failure is that of one rank: the caller, who makes more than a heap, tells the others (BufferExchanges::agree).
  SymmetricHeap(std::shared_ptr<Executor> executor, std::shared_ptr<const HeapMemory> memory, Bootstrap& bootstrap,
                const HeapBytes& bytes_for);

  std::byte* local() const { return peers_[rank_]; }
  std::size_t bytes() const { return bytes_; }
  HeapKind kind() const { return kind_; }

  /// The heap of every rank, this one included, as this process maps it. Null for ranks that share no memory with this
  /// one (ranks of other hosts, unless there is a fabric between them).
  std::span<std::byte* const> peers() const { return peers_; }
  /// The same table in memory that kernels of this rank may read.
  std::byte* const* device_peers() const { return device_peers_.get(); }

  /// Unmaps what belongs to peers, so that their owners may free it after a barrier. Idempotent.
  void unmap_peers() noexcept;

  /// When no rank uses memory of another one: the host keeps what the heap holds. If it throws, nothing has changed.
  /// @throws OutOfMemory if the host has no room.
  void keep(Bootstrap& bootstrap);
  /// After keep, by each rank: the memory goes back to the system when all ranks have called it. Addresses stay.
  void release_memory() noexcept;
  /// Memory at the same addresses, with what it held. If it throws, the heap stays suspended.
  void resume(Bootstrap& bootstrap);

  /// While no rank uses memory of another one: with new processes, which make a heap of as many bytes, in the place of
  /// the ranks with `is_new`. Their memory is mapped where that of the ranks before them was. If it throws, nothing of
  /// the other ranks has changed. @throws Unsupported where addresses cannot be kept.
  void admit(Bootstrap& bootstrap, const std::vector<bool>& is_new);

 private:
  std::size_t num_ranks() const { return peers_.size(); }
  bool shares_with(std::size_t peer) const;
  bool has_addresses_of(std::size_t peer) const;
  void try_pieces_of_peers(Bootstrap& bootstrap);
  void attach(Bootstrap& bootstrap);
  void share(Bootstrap& bootstrap, const std::vector<bool>& is_new);

  std::shared_ptr<Executor> executor_;
  std::shared_ptr<const HeapMemory> memory_;
  std::size_t rank_;
  std::vector<HeapCapabilities> ranks_;
  HeapKind kind_ = HeapKind::posix_fd;
  std::size_t bytes_ = 0;
  PhysicalMemory own_;
  std::vector<std::shared_ptr<std::byte>> ranges_;  ///< of each rank; null where this one maps nothing
  std::vector<std::byte*> peers_;
  std::shared_ptr<std::byte*> device_peers_;
  std::unique_ptr<std::byte[]> kept_;  ///< what a suspended heap holds
};

}  // namespace deep_ep
