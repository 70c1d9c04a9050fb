// A NIC as a rank uses it: opened, with what is needed to let it reach the rank's memory and be driven by its kernels.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "csrc/rdma/discovery/machine.hpp"
#include "csrc/rdma/verbs/devx/doorbell_pages.hpp"
#include "csrc/rdma/verbs/queue_pair.hpp"
#include "csrc/rdma/verbs/registration.hpp"

namespace deep_ep {
class Executor;
}

namespace deep_ep::rdma::verbs {

struct Mlx5Functions;

struct NicAccess {
  std::shared_ptr<Device> device;
  PathOptions path;
  std::string name;         ///< "mlx5_2:1", for messages
  bool mlx5 = false;        ///< by its kernel driver
  bool gpu_memory = false;  ///< heap and rings are a GPU's
  DmaBufExporter exporter;  ///< for GPU memory
  std::string handler;      ///< RdmaSettings::nic_handler
  /// Called when the handler `gpu` is tried; may throw SystemError.
  std::function<const Mlx5Functions&()> mlx5_functions;
  std::function<std::unique_ptr<PageRegistrar>()> make_registrar;

  /// Memory that this rank's kernels write, addressed from 0, strictly ordered: dma-buf first, then peer memory, for a
  /// GPU's.
  Registration register_heap(void* address, std::size_t bytes) const;
};

/// How GPU memory becomes a dma-buf; one that refuses where the settings have turned that off.
DmaBufExporter exporter_by(const RdmaSettings& settings);

/// Opens the NIC for the ranks of `executor`.
NicAccess open_nic(const NicAssignment& assignment, const Executor& executor, const RdmaSettings& settings);

}  // namespace deep_ep::rdma::verbs
