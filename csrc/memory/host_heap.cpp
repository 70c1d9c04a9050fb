#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "csrc/memory/heap_memory.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep {
namespace {

/// Addresses without memory: zeros are read there.
constexpr int kNoMemory = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

std::byte* map(std::byte* at, std::size_t bytes, int protection, int flags, int fd) {
  void* const address = ::mmap(at, bytes, protection, at == nullptr ? flags : flags | MAP_FIXED, fd, 0);
  if (address == MAP_FAILED)
    fail<SystemError>("mapping {} of shared memory: {}", format_bytes(bytes), errno_text(errno));
  return static_cast<std::byte*>(address);
}

class HostHeapMemory final : public HeapMemory {
 public:
  explicit HostHeapMemory(const ProcessIdentity& identity) : identity_(identity) {}

  HeapCapabilities capabilities(PhysicalMemory& /*trial*/) const override {
    static std::atomic<std::uint64_t> heaps = 0;
    return {.process = identity_,
            .posix_fd = true,
            .granularity = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE)),
            .heap = ++heaps};
  }

  /// A file in memory whose size nobody can change any more: in a process that has mapped it, access to a part that
  /// another process has cut off would be SIGBUS.
  PhysicalMemory create(std::size_t bytes, HeapKind /*kind*/) const override {
    const auto fd = std::make_shared<UniqueFd>(::memfd_create("deep_ep_heap", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!*fd) fail<SystemError>("memfd_create: {}", errno_text(errno));
    if (::ftruncate(fd->get(), static_cast<off_t>(bytes)) != 0) {
      fail<SystemError>("ftruncate to {}: {}", format_bytes(bytes), errno_text(errno));
    }
    if (::fcntl(fd->get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
      fail<SystemError>("F_ADD_SEALS: {}", errno_text(errno));
    }
    return fd;
  }
  SharedMemory share(const PhysicalMemory& memory, HeapKind /*kind*/) const override {
    return {.fd = std::static_pointer_cast<const UniqueFd>(memory)};
  }
  PhysicalMemory import(const SharedMemory& shared, HeapKind /*kind*/) const override { return shared.fd; }

  std::shared_ptr<std::byte> reserve(std::size_t bytes) const override {
    return {map(nullptr, bytes, PROT_READ, kNoMemory, -1), [=](std::byte* begin) { ::munmap(begin, bytes); }};
  }
  void attach(std::byte* at, std::size_t bytes, const PhysicalMemory& memory) const override {
    map(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE,
        static_cast<const UniqueFd*>(memory.get())->get());
  }
  void detach(std::byte* at, std::size_t bytes) const noexcept override {
    static_cast<void>(::mmap(at, bytes, PROT_READ, kNoMemory | MAP_FIXED, -1, 0));
  }

 private:
  ProcessIdentity identity_;
};

}  // namespace

std::shared_ptr<const HeapMemory> make_host_heap_memory(const ProcessIdentity& identity) {
  return std::make_shared<HostHeapMemory>(identity);
}

}  // namespace deep_ep
