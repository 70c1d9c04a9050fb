// File descriptors from every rank to every other rank of its host.
#pragma once

#include <span>
#include <vector>

#include "csrc/memory/process_identity.hpp"
#include "csrc/support/unique_fd.hpp"
#include "deep_ep/bootstrap.hpp"

namespace deep_ep {

/// Gives each rank a descriptor of its own for what `fd` of every other rank of its host stands for; this rank's own
/// place and those of ranks on other hosts stay empty. Collective; `ranks` says where each lives. Between processes
/// descriptors travel over unix sockets with random names in the abstract namespace (no files to leave behind), and
/// only to this user's processes that know a secret exchanged by the bootstrap. Fails on all ranks together. `fd` stays
/// the caller's and may be closed afterwards.
std::vector<UniqueFd> exchange_fds(Bootstrap& bootstrap, int fd, std::span<const ProcessIdentity> ranks,
                                   double timeout_s);

}  // namespace deep_ep
