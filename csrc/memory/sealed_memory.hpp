// Memory that processes share by a file descriptor.
#pragma once

#include <cstddef>

#include "csrc/support/unique_fd.hpp"

namespace deep_ep {

/// A file in memory, full of zeros, whose size nobody can change any more: in a process that has mapped it, access to a
/// part that another process has cut off would be SIGBUS.
/// @param name for /proc. @throws SystemError.
UniqueFd make_sealed_memory(const char* name, std::size_t bytes);

}  // namespace deep_ep
