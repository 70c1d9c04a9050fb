#include "csrc/memory/sealed_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {

UniqueFd make_sealed_memory(const char* name, std::size_t bytes) {
  UniqueFd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) fail<SystemError>("memfd_create: {}", errno_text(errno));
  if (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    fail<SystemError>("ftruncate to {}: {}", format_bytes(bytes), errno_text(errno));
  }
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    fail<SystemError>("F_ADD_SEALS: {}", errno_text(errno));
  }
  return fd;
}

}  // namespace deep_ep
