// Ranks of several machines meet over TCP.
#pragma once

#include <memory>
#include <string>

#include "deep_ep/bootstrap.hpp"

namespace deep_ep::test {

/// Rank 0 listens; the others find it at `hub`, an IPv4 address. std::runtime_error when ranks do not come within a
/// minute, or go away.
std::shared_ptr<Bootstrap> make_socket_bootstrap(int rank, int size, const std::string& hub);

}  // namespace deep_ep::test
