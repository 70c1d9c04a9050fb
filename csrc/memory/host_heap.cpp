// The symmetric heap on machines without a GPU.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "csrc/bootstrap/agreement.hpp"
#include "csrc/memory/fd_exchange.hpp"
#include "csrc/memory/heap_choice.hpp"
#include "csrc/memory/symmetric_heap.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/unique_fd.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {

namespace {

/// The last owner unmaps it.
using Mapped = std::shared_ptr<std::byte>;

Mapped map_shared(int fd, std::size_t bytes, const std::string& what) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (address == MAP_FAILED) fail<SystemError>("mapping {} of {}: {}", format_bytes(bytes), what, errno_text(errno));
  return {static_cast<std::byte*>(address), [bytes](std::byte* gone) { munmap(gone, bytes); }};
}

/// Heaps of this process, by address. Threads that are ranks use a peer's heap where its owner has it, and keep it as
/// long as another process would keep its own mapping: a NIC of theirs may still write there when the owner has left.
class HeapsHere {
 public:
  static void add(const Mapped& heap) {
    const std::lock_guard lock(mutex_);
    std::erase_if(heaps_, [](const auto& one) { return one.second.expired(); });
    heaps_[reinterpret_cast<std::uintptr_t>(heap.get())] = heap;
  }
  static Mapped find(std::uint64_t address) {
    const std::lock_guard lock(mutex_);
    const auto found = heaps_.find(address);
    auto kept = found == heaps_.end() ? nullptr : found->second.lock();
    if (kept == nullptr) throw SystemError("a heap of this process is gone before its peers have seen it");
    return kept;
  }

 private:
  inline static std::mutex mutex_;
  inline static std::map<std::uint64_t, std::weak_ptr<std::byte>> heaps_;
};

/// A rank sends this to the others about the heap that it has made.
struct HostExport {
  std::uint64_t address = 0;
  FdOffer offer;
};

class HostHeap final : public SymmetricHeap {
 public:
  HostHeap(Bootstrap& bootstrap, const HeapOptions& options, const ProcessIdentity& identity) {
    const HeapCapabilities facts{
        .process = identity, .posix_fd = true, .granularity = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE))};
    const std::vector<HeapCapabilities> ranks = all_gather_values(bootstrap, facts);
    const auto own_rank = static_cast<std::size_t>(bootstrap.rank());
    bytes_ = plan_heap(ranks, options).bytes;
    UniqueFd fd;
    OfferedFd mine;
    agree(bootstrap, "allocating the heap", [&] {
      fd = create();
      mine = make_fd_offer(fd.get());
    });
    const auto all = all_gather_values(bootstrap, HostExport{reinterpret_cast<std::uintptr_t>(local()), mine.offer});
    agree(bootstrap, "mapping the heaps of peers", [&] {
      std::vector<FdOffer> offers;
      std::vector<ProcessIdentity> takers;
      for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
        offers.push_back(all[rank].offer);
        takers.push_back(ranks[rank].process);
        // Threads of this process need no descriptor, and would use up the many that it may have open.
        if (rank != own_rank && takers.back().same_process(identity)) takers.back().boot_id = {};
      }
      const auto fds = take_fds(bootstrap.rank(), std::move(mine), offers, takers, options.timeout_s);
      map_peers(ranks, all, identity, fds);
    });
  }

  std::byte* local() const override { return local_.get(); }
  std::size_t bytes() const override { return bytes_; }
  HeapKind kind() const override { return HeapKind::posix_fd; }
  std::span<std::byte* const> peers() const override { return peers_; }
  std::byte* const* device_peers() const override { return peers_.data(); }
  void unmap_peers() noexcept override { mappings_.clear(); }

  void keep(Bootstrap& bootstrap) override {
    try {
      agree(bootstrap, "keeping what the heap holds", [&] { kept_.assign(local(), local() + bytes_); });
      bootstrap.barrier();
    } catch (...) {
      kept_ = {};
      throw;
    }
  }
  /// Mappings, those of peers, too, read zeros from then on, until a rank writes.
  void release_memory() noexcept override { madvise(local(), bytes_, MADV_REMOVE); }
  void resume(Bootstrap& bootstrap) override {
    std::copy(kept_.begin(), kept_.end(), local());
    kept_ = {};
    bootstrap.barrier();
  }

 private:
  UniqueFd create() {
    UniqueFd fd = make_sealed_memory("deep_ep_heap", bytes_);
    local_ = map_shared(fd.get(), bytes_, "its own heap");
    HeapsHere::add(local_);
    return fd;
  }

  void map_peers(const std::vector<HeapCapabilities>& ranks, const std::vector<HostExport>& all,
                 const ProcessIdentity& identity, const std::vector<UniqueFd>& fds) {
    for (std::size_t peer = 0; peer < all.size(); ++peer) {
      if (ranks[peer].process.same_process(identity)) {
        mappings_.push_back(HeapsHere::find(all[peer].address));
      } else if (fds[peer]) {
        mappings_.push_back(map_shared(fds[peer].get(), bytes_, fmt::format("the heap of rank {}", peer)));
      } else {
        peers_.push_back(nullptr);  // on another host
        continue;
      }
      peers_.push_back(mappings_.back().get());
    }
  }

  std::size_t bytes_ = 0;
  Mapped local_;
  std::vector<Mapped> mappings_;  ///< of the heaps of all ranks on this host
  std::vector<std::byte*> peers_;
  std::vector<std::byte> kept_;  ///< what a suspended heap holds
};

}  // namespace

std::unique_ptr<SymmetricHeap> make_host_heap(Bootstrap& bootstrap, const HeapOptions& options,
                                              const ProcessIdentity& identity) {
  return std::make_unique<HostHeap>(bootstrap, options, identity);
}

}  // namespace deep_ep
