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

/// `at`: the place of another mapping of as many bytes, which is gone then.
std::byte* map_at(std::byte* at, int fd, std::size_t bytes, const std::string& what) {
  const int fixed = at == nullptr ? 0 : MAP_FIXED;
  void* address = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE | fixed, fd, 0);
  if (address == MAP_FAILED) fail<SystemError>("mapping {} of {}: {}", format_bytes(bytes), what, errno_text(errno));
  return static_cast<std::byte*>(address);
}

Mapped map_shared(int fd, std::size_t bytes, const std::string& what) {
  return {map_at(nullptr, fd, bytes, what), [bytes](std::byte* gone) { munmap(gone, bytes); }};
}

/// Heaps of this process, by number. Threads that are ranks use a peer's heap where its owner has it, and keep it as
/// long as another process would keep its own mapping: a NIC of theirs may still write there when the owner has left.
class HeapsHere {
 public:
  static std::uint64_t next_number() {
    const std::lock_guard lock(mutex_);
    return ++newest_;
  }
  static void add(std::uint64_t number, const Mapped& heap) {
    const std::lock_guard lock(mutex_);
    std::erase_if(heaps_, [](const auto& one) { return one.second.expired(); });
    heaps_[number] = heap;
  }
  static Mapped find(std::uint64_t number) {
    const std::lock_guard lock(mutex_);
    const auto found = heaps_.find(number);
    auto kept = found == heaps_.end() ? nullptr : found->second.lock();
    if (kept == nullptr) throw SystemError("a heap of this process is gone before its peers have seen it");
    return kept;
  }

 private:
  inline static std::mutex mutex_;
  inline static std::uint64_t newest_ = 0;
  inline static std::map<std::uint64_t, std::weak_ptr<std::byte>> heaps_;
};

class HostHeap final : public SymmetricHeap {
 public:
  HostHeap(Bootstrap& bootstrap, const HeapOptions& options, const ProcessIdentity& identity)
      : own_{.process = identity,
             .posix_fd = true,
             .granularity = static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)),
             .heap = HeapsHere::next_number()},
        timeout_s_(options.timeout_s),
        ranks_(all_gather_values(bootstrap, own_)),
        mappings_(ranks_.size()),
        peers_(ranks_.size()) {
    bytes_ = plan_heap(ranks_, options).bytes;
    agree(bootstrap, "allocating the heap", [&] { create(); });
    share(bootstrap, std::vector<bool>(ranks_.size(), true));
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

  void admit(Bootstrap& bootstrap, const std::vector<bool>& is_new) override {
    for (std::size_t peer = 0; peer < ranks_.size(); ++peer) {  // the memory of a thread of this process is not ours
      if (is_new[peer] && ranks_[peer].process.same_process(own_.process)) mappings_[peer] = nullptr;
    }
    ranks_ = all_gather_values(bootstrap, own_);
    share(bootstrap, is_new);
  }

 private:
  void create() {
    fd_ = make_sealed_memory("deep_ep_heap", bytes_);
    local_ = map_shared(fd_.get(), bytes_, "its own heap");
    HeapsHere::add(own_.heap, local_);
  }

  /// Collective: ranks with `is_new` give their heaps to all others, and get theirs.
  void share(Bootstrap& bootstrap, const std::vector<bool>& is_new) {
    const bool is_own_new = is_new[static_cast<std::size_t>(bootstrap.rank())];
    std::vector<bool> partners;
    for (std::size_t peer = 0; peer < ranks_.size(); ++peer) {
      // Threads of this process need no descriptor, and would use up the many that it may have open.
      const ProcessIdentity& process = ranks_[peer].process;
      partners.push_back((is_new[peer] || is_own_new) && process.same_host(own_.process) &&
                         !process.same_process(own_.process));
    }
    const std::vector<UniqueFd> fds = exchange_fds(bootstrap, fd_.get(), partners, timeout_s_);
    agree(bootstrap, "mapping the heaps of peers", [&] {
      for (std::size_t peer = 0; peer < ranks_.size(); ++peer) {
        if (is_new[peer] || is_own_new) map_peer(peer, fds[peer]);
      }
    });
  }

  void map_peer(std::size_t peer, const UniqueFd& fd) {
    const std::string what = fmt::format("the heap of rank {}", peer);
    if (ranks_[peer].process.same_process(own_.process)) {
      mappings_[peer] = HeapsHere::find(ranks_[peer].heap);
    } else if (fd && mappings_[peer]) {
      map_at(mappings_[peer].get(), fd.get(), bytes_, what);
    } else if (fd) {
      mappings_[peer] = map_shared(fd.get(), bytes_, what);
    }
    peers_[peer] = mappings_[peer].get();  // null: on another host
  }

  const HeapCapabilities own_;
  const double timeout_s_;
  std::vector<HeapCapabilities> ranks_;
  std::size_t bytes_ = 0;
  UniqueFd fd_;  ///< for processes that take the place of others
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
