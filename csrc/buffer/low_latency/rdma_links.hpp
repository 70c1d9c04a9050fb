// Low-latency calls to ranks that are reached by RDMA: their queue pairs, and what has been sent over them.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "csrc/buffer/runtime.hpp"
#include "csrc/rdma/connections.hpp"
#include "kernels/low_latency/params.hpp"

namespace deep_ep {

/// How many barriers, and calls of each kind, a rank counts.
struct LowLatencyCounts {
  std::uint64_t barriers = 0;
  std::array<std::uint64_t, kLowLatencyKinds> calls{};
};

class RdmaLinks {
 public:
  /// Collective.
  explicit RdmaLinks(Runtime& runtime);
  RdmaLinks(const RdmaLinks&) = delete;
  RdmaLinks& operator=(const RdmaLinks&) = delete;

  /// Tells kernels of the far ranks.
  void add_to(LowLatencyParams& params) const;
  std::byte* const* heaps() const { return heaps_.get(); }

  /// For people: whom they reach, whether by rails, over which NIC.
  std::string describe() const;
  std::string health() const { return connections_->health(); }
  /// Throws SystemError for an operation that has failed.
  void check() const { connections_->check(); }
  /// After the last call. Its kernels have ended, but what they posted may not have reached the peers, who wait for it.
  void drain() noexcept { connections_->drain_at_end(runtime_.rank(), runtime_.timeout_s()); }
  /// After all ranks have ended their work: new queue pairs, and all that was told over the old ones as it would be
  /// after so many calls.
  void resume(const LowLatencyCounts& counts);

 private:
  Runtime& runtime_;
  const std::vector<int>& far_;  ///< ranks that are reached by RDMA
  std::unique_ptr<rdma::Connections> connections_;
  std::shared_ptr<LowLatencyTold> told_;  ///< device memory, [num_ranks]
  std::shared_ptr<std::byte*> heaps_;     ///< device memory, [num_ranks]
};

}  // namespace deep_ep
