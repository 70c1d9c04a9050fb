// The ends of a rank's queue pairs on its NIC, for each handler.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "csrc/memory/symmetric_heap.hpp"
#include "csrc/rdma/discovery/nic_map.hpp"
#include "csrc/rdma/ends.hpp"
#include "csrc/rdma/verbs/gpu_access.hpp"
#include "csrc/rdma/verbs/queue_pair.hpp"

namespace deep_ep {
class Executor;
}
namespace deep_ep::rdma::verbs {

struct Mlx5Functions;
namespace devx {
struct DevxDevice;
}

/// What ends on a NIC need: the NIC, and what lets it reach the rank's memory and be driven by its kernels.
struct NicAccess {
  NicAssignment nic;
  std::shared_ptr<Device> device;               ///< after open()
  std::optional<GpuAccess> gpu;                 ///< whose are heap and rings; nothing: the CPU's
  bool relaxed_ordering = false;                ///< of payload
  const Mlx5Functions* mlx5 = nullptr;          ///< null: those of this machine
  std::shared_ptr<devx::DevxDevice> devx = {};  ///< what all ends by DevX share; the first one makes it
  /// NICs of this node, by which their rails' ranks of other nodes write to this rank's heap: of each rail, where ends
  /// keep to rails; null for this rank's own.
  std::vector<std::shared_ptr<Device>> landing_nics = {};

  /// Opens a port of a device for the heap. Of another device than this rank's, errors name both.
  std::shared_ptr<Device> open(const std::string& name, const PathOptions& path, const VerbsFunctions& functions,
                               const SymmetricHeap& heap) const;
};

/// The base of the ends of all handlers: the NIC, and queue pairs by which others write to this rank's heap.
class NicEnds : public Ends {
 public:
  NicEnds(const NicAccess& nic, const ConnectionOptions& options);
  QueuePairAddress landing(std::size_t end) const override { return landings_.at(end)->address(); }
  void connect_landing(std::size_t end, const QueuePairAddress& peer) override { landings_.at(end)->connect(peer); }

 protected:
  NicAccess nic_;

 private:
  std::vector<std::optional<QueuePair>> landings_;  ///< of ends whose peers are on other rails
};

/// The path of the settings, from the port that was assigned. Without a variable, the traffic class is what the
/// administrator set for that port.
PathOptions path_by(const RdmaSettings& settings, const NicAssignment& assignment);

/// May PCIe bring payload in any order?
bool relaxes_ordering(const RdmaSettings& settings, const Nic& nic);

/// For the ranks of `executor`.
NicAccess open_nic(const NicAssignment& assignment, const Executor& executor, const RdmaSettings& settings,
                   const SymmetricHeap& heap);

/// Makes queue pairs for this handler, and in `nic` all that ends on it share. SystemError: the device refuses, or the
/// handler is impossible here.
std::unique_ptr<Ends> make_nic_ends(NicHandler handler, NicAccess& nic, const std::shared_ptr<Executor>& executor,
                                    const ConnectionOptions& options);

/// Handler `cpu`: verbs queue pairs, rings in pinned memory.
std::unique_ptr<Ends> make_verbs_ends(const NicAccess& nic, const std::shared_ptr<Executor>& executor,
                                      const ConnectionOptions& options);

/// Handlers `gpu` and `doorbell`: DevX queue pairs. Rings lie in the GPU's memory, or in pinned memory if the device
/// cannot use that. SystemError: kernels of this executor cannot drive this device, and why.
std::unique_ptr<Ends> make_devx_ends(NicHandler handler, NicAccess& nic, const std::shared_ptr<Executor>& executor,
                                     const ConnectionOptions& options);

}  // namespace deep_ep::rdma::verbs
