#include "csrc/memory/host_heap.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "csrc/support/format.hpp"
#include "csrc/support/unique_fd.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {

namespace {

// What `pid` alone cannot say: two containers may both have a process 7.
std::uint64_t process_token() {
  static pid_t owner = 0;
  static std::uint64_t token = 0;
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  if (owner != getpid()) {  // a forked child is another process
    std::random_device random;
    token = static_cast<std::uint64_t>(random()) << 32 | random();
    owner = getpid();
  }
  return token;
}

class Mapping {
 public:
  Mapping() = default;
  Mapping(void* address, std::size_t bytes) : address_(static_cast<std::byte*>(address)), bytes_(bytes) {}
  Mapping(Mapping&& other) noexcept : address_(std::exchange(other.address_, nullptr)), bytes_(other.bytes_) {}
  Mapping& operator=(Mapping&& other) noexcept {
    std::swap(address_, other.address_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Mapping() {
    if (address_ != nullptr) munmap(address_, bytes_);
  }
  std::byte* address() const { return address_; }

 private:
  std::byte* address_ = nullptr;
  std::size_t bytes_ = 0;
};

Mapping map_shared(int fd, std::size_t bytes, const std::string& what) {
  void* address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (address == MAP_FAILED) fail<SystemError>("mapping {} of {}: {}", format_bytes(bytes), what, errno_text(errno));
  return {address, bytes};
}

/// What a rank tells the others about its heap.
struct Export {
  std::array<char, 40> boot_id{};  ///< of the host
  std::uint64_t process = 0;
  std::uint64_t address = 0;
  std::uint64_t bytes = 0;
  std::int32_t pid = 0;
  std::int32_t fd = -1;
  char error[96] = {};  ///< not empty: why this rank failed
};

void set_error(Export& e, const std::string& text) { text.copy(e.error, sizeof e.error - 1); }

std::vector<Export> exchange(Bootstrap& bootstrap, const Export& mine) {
  const auto bytes = bootstrap.all_gather(std::as_bytes(std::span(&mine, 1)));
  std::vector<Export> all(static_cast<std::size_t>(bootstrap.size()));
  std::memcpy(all.data(), bytes.data(), all.size() * sizeof(Export));
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    // On every rank alike, so that nobody goes on alone.
    if (all[rank].error[0] != '\0') fail<SystemError>("symmetric heap of rank {}: {}", rank, all[rank].error);
  }
  return all;
}

class HostHeap final : public SymmetricHeap {
 public:
  HostHeap(Bootstrap& bootstrap, const HeapOptions& options, const ProcessIdentity& identity)
      : boot_id_(identity.boot_id) {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    bytes_ = (std::max<std::size_t>(options.bytes, 1) + page - 1) / page * page;
    const auto all = exchange(bootstrap, create());
    for (std::size_t rank = 0; rank < all.size(); ++rank) {
      if (all[rank].bytes != bytes_) {
        fail<RankMismatch>("symmetric heap: rank {} asks for {} bytes, rank {} for {}; they must be equal", rank,
                           all[rank].bytes, bootstrap.rank(), bytes_);
      }
    }
    // The second round keeps every file descriptor open until all ranks have mapped it, and reports failures.
    Export mapped;
    try {
      map_peers(all);
    } catch (const Error& e) {
      set_error(mapped, e.what());
    }
    exchange(bootstrap, mapped);
    fd_ = UniqueFd();
  }

  std::byte* local() const override { return local_.address(); }
  std::size_t bytes() const override { return bytes_; }
  HeapKind kind() const override { return HeapKind::posix_fd; }
  std::span<std::byte* const> peers() const override { return peers_; }
  std::byte* const* device_peers() const override { return peers_.data(); }
  void unmap_peers() noexcept override { mappings_.clear(); }

 private:
  Export create() {
    Export mine;
    try {
      fd_ = UniqueFd(memfd_create("deep_ep_heap", MFD_CLOEXEC));
      if (!fd_) fail<SystemError>("memfd_create: {}", errno_text(errno));
      if (ftruncate(fd_.get(), static_cast<off_t>(bytes_)) != 0) {
        fail<SystemError>("ftruncate to {}: {}", format_bytes(bytes_), errno_text(errno));
      }
      local_ = map_shared(fd_.get(), bytes_, "its own heap");
    } catch (const Error& e) {
      set_error(mine, e.what());
    }
    mine.boot_id = boot_id_;
    mine.process = process_token();
    mine.address = reinterpret_cast<std::uintptr_t>(local_.address());
    mine.bytes = bytes_;
    mine.pid = getpid();
    mine.fd = fd_.get();
    return mine;
  }

  void map_peers(const std::vector<Export>& all) {
    for (const Export& peer : all) {
      if (peer.boot_id != boot_id_) {
        peers_.push_back(nullptr);
        continue;
      }
      if (peer.process == process_token()) {
        peers_.push_back(reinterpret_cast<std::byte*>(peer.address));
        continue;
      }
      const std::string path = fmt::format("/proc/{}/fd/{}", peer.pid, peer.fd);
      const UniqueFd fd(open(path.c_str(), O_RDWR | O_CLOEXEC));
      if (!fd) fail<SystemError>("open {}: {}", path, errno_text(errno));
      mappings_.push_back(map_shared(fd.get(), bytes_, path));
      peers_.push_back(mappings_.back().address());
    }
  }

  std::array<char, 40> boot_id_;  ///< of this host
  std::size_t bytes_ = 0;
  UniqueFd fd_;
  Mapping local_;
  std::vector<Mapping> mappings_;  ///< of other processes' heaps
  std::vector<std::byte*> peers_;
};

}  // namespace

std::unique_ptr<SymmetricHeap> make_host_heap(Bootstrap& bootstrap, const HeapOptions& options,
                                              const ProcessIdentity& identity) {
  return std::make_unique<HostHeap>(bootstrap, options, identity);
}

}  // namespace deep_ep
