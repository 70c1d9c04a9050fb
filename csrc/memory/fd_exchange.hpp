// File descriptors from ranks to other ranks of their host.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "csrc/support/unique_fd.hpp"
#include "deep_ep/bootstrap.hpp"

namespace deep_ep {

/// Gives this rank a descriptor of its own for what `fd` of each of `partners` stands for, [rank]; the places of others
/// stay empty. Collective; of two ranks each or none has the other one for a partner, none has itself, and both are in
/// one network namespace. Descriptors travel over unix sockets with random names in the abstract namespace (no files to
/// leave behind), only to this user's processes, and only from those that know a secret exchanged by the bootstrap. A
/// failure is that of one rank. `fd` stays the caller's and may be closed afterwards: all have it then, threads of this
/// process, too, which could not know until when its number stands for the same file.
std::vector<UniqueFd> exchange_fds(Bootstrap& bootstrap, int fd, std::span<const std::size_t> partners);

}  // namespace deep_ep
