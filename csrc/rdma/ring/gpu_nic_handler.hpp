// The `gpu` handler: the mlx5 device serves the rings by itself, kernels ring its doorbell. Nothing to do for this
// process but to know whose rings they are when something fails.
#pragma once

#include <mutex>
#include <vector>

#include "csrc/rdma/ring/nic_handler.hpp"

namespace deep_ep::rdma {

class GpuNicHandler final : public NicHandler {
 public:
  NicHandlerKind kind() const override { return NicHandlerKind::gpu; }
  void add(const HandledRing& ring) override;
  void remove(std::uint32_t number) noexcept override;

  /// Looks into the completion entries of all rings whose memory the host can read (HandledRing::completion is not
  /// null). Rings in GPU memory are watched by the kernels alone, which put failures on record
  /// (FaultKind::rdma_failed).
  std::optional<Failure> failure() const override;

 private:
  mutable std::mutex mutex_;
  std::vector<HandledRing> rings_;
};

}  // namespace deep_ep::rdma
