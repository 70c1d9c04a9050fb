// Why an RDMA operation failed, in words.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "kernels/rdma/decode.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep {
struct FaultRecord;
}

namespace deep_ep::rdma {

using device::rdma::Syndrome;

/// What the code means and what usually causes it. Any value is allowed.
std::string_view text(Syndrome syndrome);

struct Failure {
  int peer = -1;                            ///< rank at the other end
  std::string device = {};                  ///< the NIC or wire that reported it; empty: unknown
  std::uint32_t queue_pair = 0;             ///< 0: unknown
  std::optional<std::uint64_t> index = {};  ///< of the entry, since the queue pair was made; nothing: unknown
  RdmaFailure why = {};                     ///< syndrome 0: no completion said so, but `detail` does
  std::string detail = {};                  ///< more about the cause; may be empty
};

/// One sentence without a full stop: operation, peer, device, queue pair, entry, syndrome with its text.
std::string describe(const Failure& failure);

/// The same for a fault that a kernel put on record (FaultKind::rdma_failed) on this rank.
std::string describe_fault(int rank, const FaultRecord& fault);

}  // namespace deep_ep::rdma
