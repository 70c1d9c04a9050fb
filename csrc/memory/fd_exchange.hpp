// File descriptors from every rank to every other rank of its host.
#pragma once

#include <span>
#include <vector>

#include "csrc/memory/process_identity.hpp"
#include "csrc/support/token.hpp"
#include "csrc/support/unique_fd.hpp"
#include "deep_ep/bootstrap.hpp"

namespace deep_ep {

/// A rank sends this to the others, before they take a descriptor of it. Plain data.
struct FdOffer {
  Token name;    ///< of the socket; visible to every process of the host
  Token secret;  ///< what a peer must say to be served
};

/// The same as exchange_fds, for ranks that tell each other their offers along with something else: make_fd_offer,
/// then an all-gather of the offers, then take_fds.
struct OfferedFd {
  FdOffer offer;
  int fd = -1;
  UniqueFd listener;
};
OfferedFd make_fd_offer(int fd);
std::vector<UniqueFd> take_fds(int rank, OfferedFd mine, std::span<const FdOffer> offers,
                               std::span<const ProcessIdentity> ranks, double timeout_s);

/// Gives each rank a descriptor of its own for what `fd` of every other rank of its host stands for; this rank's own
/// place and those of ranks on other hosts stay empty. Collective; `ranks` says where each lives. Descriptors travel
/// over unix sockets with random names in the abstract namespace (no files to leave behind), and only to this user's
/// processes that know a secret exchanged by the bootstrap. If it fails on one rank, the others throw before their next
/// exchange ends. `fd` stays the caller's and may be closed afterwards: all have it then, threads of this process, too,
/// which could not know until when its number stands for the same file.
std::vector<UniqueFd> exchange_fds(Bootstrap& bootstrap, int fd, std::span<const ProcessIdentity> ranks,
                                   double timeout_s);

/// A file in memory, full of zeros, whose size nobody can change any more: in a process that has mapped it, access to a
/// part that another process has cut off would be SIGBUS.
/// @param name for /proc. @throws SystemError.
UniqueFd make_sealed_memory(const char* name, std::size_t bytes);

}  // namespace deep_ep
