#include "csrc/memory/symmetric_heap.hpp"

#include <algorithm>
#include <map>
#include <mutex>
#include <new>
#include <utility>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/memory/executor_memory.hpp"
#include "csrc/memory/fd_exchange.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/host_memory.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep {

namespace {

/// Heaps of this process, by number. Threads that are ranks of the CPU use a peer's heap where its owner has it
/// (ThreadSanitizer compares addresses), and keep it as long as another process would keep its own mapping: a NIC of
/// theirs may still write there when the owner has left.
std::mutex heaps_here_mutex;
std::map<std::uint64_t, std::weak_ptr<std::byte>> heaps_here;

}  // namespace

SymmetricHeap::SymmetricHeap(std::shared_ptr<Executor> executor, std::shared_ptr<const HeapMemory> memory,
                             Bootstrap& bootstrap, const HeapBytes& bytes_for)
    : executor_(std::move(executor)),
      memory_(std::move(memory)),
      rank_(static_cast<std::size_t>(bootstrap.rank())),
      ranks_(static_cast<std::size_t>(bootstrap.size())),
      ranges_(ranks_.size()),
      peers_(ranks_.size()) {
  PhysicalMemory trial;
  ranks_[rank_] = memory_->capabilities(trial);
  ranks_ = all_gather_values(bootstrap, ranks_[rank_]);
  kind_ = choose_heap(ranks_);
  if (kind() == HeapKind::fabric) {
    try_pieces_of_peers(bootstrap);
    kind_ = choose_heap(ranks_);
  }
  bytes_ = heap_bytes(kind(), ranks_, bytes_for);
  for (std::size_t peer = 0; peer < num_ranks(); ++peer) {
    if (shares_with(peer) && !has_addresses_of(peer)) ranges_[peer] = memory_->reserve(bytes());
  }
  if (ranks_[rank_].heap != 0) {
    const std::lock_guard lock(heaps_here_mutex);
    std::erase_if(heaps_here, [](const auto& one) { return one.second.expired(); });
    heaps_here[ranks_[rank_].heap] = ranges_[rank_];
  }
  device_peers_ = device_memory<std::byte*>(executor_, num_ranks() * sizeof(std::byte*));
  attach(bootstrap);
  if (executor_->device().kind == Device::Kind::cpu) return;  // it is full of zeros, and not allocated
  const OwnStream stream(*executor_);
  executor_->fill(local(), 0, bytes(), stream.get());
  executor_->synchronize(stream.get());
}

void SymmetricHeap::unmap_peers() noexcept {
  for (std::size_t peer = 0; peer < num_ranks(); ++peer) {
    if (peer == rank_) continue;
    ranges_[peer] = nullptr;
    peers_[peer] = nullptr;
  }
}

void SymmetricHeap::keep(Bootstrap& bootstrap) {
  // The system promises more memory than it has, and ends a process that takes it.
  const auto here = [&](const HeapCapabilities& rank) { return rank.process.same_host(ranks_[rank_].process); };
  const auto ranks = static_cast<std::size_t>(std::ranges::count_if(ranks_, here));
  const std::size_t available = available_host_memory();
  bootstrap.barrier();  // no rank allocates before all ranks have read what is available
  std::unique_ptr<std::byte[]> kept;
  if (bytes() <= available / ranks) kept.reset(new (std::nothrow) std::byte[bytes()]);
  if (kept == nullptr) {
    fail<OutOfMemory>("suspend: the host has {} for what the heaps of {} ranks hold, {} each", format_bytes(available),
                      ranks, format_bytes(bytes()));
  }
  copy_now(*executor_, kept.get(), local(), bytes());
  bootstrap.barrier();
  kept_ = std::move(kept);
}

void SymmetricHeap::release_memory() noexcept {
  own_ = nullptr;
  for (std::size_t peer = 0; peer < num_ranks(); ++peer) {
    if (ranges_[peer] != nullptr && !has_addresses_of(peer)) memory_->detach(ranges_[peer].get(), bytes());
    if (peer != rank_) peers_[peer] = nullptr;  // so that `share` does not detach it once more
  }
}

void SymmetricHeap::resume(Bootstrap& bootstrap) {
  try {
    attach(bootstrap);
    copy_now(*executor_, local(), kept_.get(), bytes());
    bootstrap.barrier();
  } catch (...) {
    release_memory();
    throw;
  }
  kept_.reset();
}

/// The same exchanges as of the constructor with descriptors.
void SymmetricHeap::admit(Bootstrap& bootstrap, const std::vector<bool>& is_new) {
  const std::vector<HeapCapabilities> next = all_gather_values(bootstrap, ranks_[rank_]), before = ranks_;
  try {
    const HeapKind then = choose_heap(next);
    const auto as_before = [&](auto) { return bytes(); };
    if (kind() != HeapKind::posix_fd || then != kind() || heap_bytes(then, next, as_before) != bytes()) {
      fail<Unsupported>("replace_ranks: the heaps of {} are shared by {}, with the new ranks by {}, allowed: {}",
                        format_bytes(bytes()), name_of(kind()), name_of(then), name_of(HeapKind::posix_fd));
    }
    for (std::size_t peer = 0; peer < num_ranks(); ++peer) {
      if (!is_new[peer] || !has_addresses_of(peer)) continue;  // those of a thread of this process are its own
      ranges_[peer] = memory_->reserve(bytes());
    }
    ranks_ = next;
    share(bootstrap, is_new);
  } catch (...) {
    ranks_ = before;
    throw;
  }
}

bool SymmetricHeap::shares_with(std::size_t peer) const {
  return peer == rank_ || shares_memory(kind(), ranks_[rank_], ranks_[peer]);
}

/// Does a peer's own range serve this rank, too?
bool SymmetricHeap::has_addresses_of(std::size_t peer) const {
  return peer != rank_ && ranks_[peer].heap != 0 && ranks_[peer].process.same_process(ranks_[rank_].process);
}

/// GPUs that have fabric handles need not be in one NVLink domain: each rank tries the others' small pieces, so that
/// the heap is made once. If one cannot be mapped, all count as ranks without a fabric.
void SymmetricHeap::try_pieces_of_peers(Bootstrap& bootstrap) {
  const auto failure = first_failure(bootstrap, [&] {
    for (std::size_t peer = 0; peer < num_ranks(); ++peer) {
      if (peer != rank_) memory_->import({.fabric = ranks_[peer].fabric_trial}, HeapKind::fabric);
    }
  });
  if (!failure) return;
  log::warn("rank {}: not all ranks can map each other's memory, those of other hosts are left to RDMA: {}", rank_,
            failure->why);
  for (HeapCapabilities& rank : ranks_) rank.fabric = false;
}

/// Collective: new memory of each rank, where all ranks that share it have reserved addresses.
void SymmetricHeap::attach(Bootstrap& bootstrap) {
  own_ = memory_->create(bytes(), kind());
  memory_->attach(ranges_[rank_].get(), bytes(), own_);
  share(bootstrap, std::vector<bool>(num_ranks(), true));
}

/// Collective: ranks with `is_new` give their memory to all others, and get theirs.
void SymmetricHeap::share(Bootstrap& bootstrap, const std::vector<bool>& is_new) {
  std::vector<std::size_t> partners;
  for (std::size_t peer = 0; peer < num_ranks(); ++peer) {
    const bool is_other = peer != rank_ && !has_addresses_of(peer);
    if (is_other && (is_new[peer] || is_new[rank_]) && shares_with(peer)) partners.push_back(peer);
  }
  const SharedMemory mine = memory_->share(own_, kind());
  std::vector<FabricHandle> handles(num_ranks());
  std::vector<UniqueFd> fds(num_ranks());
  if (kind() == HeapKind::fabric) {
    handles = all_gather_values(bootstrap, mine.fabric);
  } else {
    fds = exchange_fds(bootstrap, mine.fd->get(), partners);
  }
  std::vector<PhysicalMemory> imported(num_ranks());  // all before anything is unmapped
  for (const std::size_t peer : partners) {
    const auto fd = std::make_shared<UniqueFd>(std::move(fds[peer]));
    imported[peer] = memory_->import({.fd = fd, .fabric = handles[peer]}, kind());
  }
  for (const std::size_t peer : partners) {
    if (peers_[peer] != nullptr) memory_->detach(ranges_[peer].get(), bytes());
    memory_->attach(ranges_[peer].get(), bytes(), imported[peer]);
  }
  for (std::size_t peer = 0; peer < num_ranks(); ++peer) {
    if (has_addresses_of(peer)) {
      const std::lock_guard lock(heaps_here_mutex);
      ranges_[peer] = heaps_here[ranks_[peer].heap].lock();
      if (ranges_[peer] == nullptr) throw SystemError("a heap of this process is gone before its peers have seen it");
    }
    peers_[peer] = ranges_[peer].get();
  }
  copy_now(*executor_, device_peers_.get(), peers_.data(), num_ranks() * sizeof(std::byte*));
}

}  // namespace deep_ep
