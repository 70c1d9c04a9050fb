// Ranks of several machines meet over TCP: no launcher, no shared file system. For tests and tools.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "csrc/support/environment.hpp"
#include "csrc/support/token.hpp"
#include "deep_ep/bootstrap.hpp"

namespace deep_ep {

/// The same for equal texts, on all machines. Different texts give different tokens, unless they were made not to: a
/// token keeps those apart that do not know of each other, it is no proof against forgery.
inline Token token_of(std::string_view text) {
  const auto digest = [&](std::uint64_t state) {  // FNV-1a, and a mixer that spreads the last bytes
    for (const char byte : text) state = (state ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
    state = (state ^ (state >> 32)) * 0xd6e8feb86659fd93;
    return state ^ (state >> 32);
  };
  return {{digest(0xcbf29ce484222325), digest(0x9e3779b97f4a7c15)}};
}

/// Ranks that meet over TCP show it to each other, so that a rank of another job that calls on a port of this one is no
/// rank of this group. It comes from what all ranks of a job know already: the text of DEEP_EP_JOB_TOKEN (`deep_ep
/// bench --spawn` gives ranks of one host 128 random bits there), else `job`, by which the caller's launcher tells jobs
/// apart. Without either, all jobs have the same token.
inline Token job_token(std::string_view job = {}, const environment::Source& source = environment::of_process) {
  const environment::Value agreed = environment::Reader{source}.value("DEEP_EP_JOB_TOKEN");
  return token_of(agreed.text.empty() ? job : agreed.text);
}

/// Collective. Rank 0 listens on all its addresses; the others call it at `hub`, a name or address, until it answers.
/// Other callers are logged and left out. After a call has failed, all further ones fail, too.
/// @param timeout_s seconds for the others to come, and in each call.
/// @param job the same on all ranks, and another one in other jobs: a caller with another token is refused.
/// @throws TimeoutError when ranks do not come, SystemError where the network refuses or a rank went away, RankMismatch
/// where a rank of this job has another version of the library.
std::shared_ptr<Bootstrap> make_socket_bootstrap(int rank, int size, const std::string& hub, std::uint16_t port,
                                                 double timeout_s, const Token& job = job_token());

}  // namespace deep_ep
