#include "csrc/rdma/verbs/nic_ends.hpp"

#include <utility>

#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::rdma::verbs {

PathOptions path_by(const RdmaSettings& settings, const NicAssignment& assignment) {
  PathOptions path = settings.path;
  path.port = assignment.port.number;
  path.gid_index = assignment.gid.index;
  if (!settings.has_traffic_class) path.traffic_class = assignment.port.traffic_class.value_or(path.traffic_class);
  return path;
}

std::shared_ptr<Device> NicAccess::open(const std::string& name, const PathOptions& path,
                                        const VerbsFunctions& functions, const SymmetricHeap& heap) const try {
  if (gpu && !gpu->keeps_order_of_writes) {
    fail<SystemError>(
        "NIC {} cannot serve this GPU: the GPU does not keep the order of what NICs write (attribute "
        "GPU_DIRECT_RDMA_WRITES_ORDERING is 0), so that a signal could be seen before its data",
        nic.name());
  }
  const MemoryRange range{.address = heap.local(), .bytes = heap.bytes(), .gpu = gpu ? &gpu->export_dma_buf : nullptr};
  return std::make_shared<Device>(name, path, functions, range, relaxed_ordering);
} catch (const Error& error) {
  if (name == nic.nic.name) throw;
  fail<SystemError>("NIC {} cannot receive for this rank, whose NIC is {}: {}", name, nic.name(), error.what());
}

bool relaxes_ordering(const RdmaSettings& settings, const Nic& nic) {
  if (settings.relaxed_ordering != Choice::automatic) return settings.relaxed_ordering == Choice::yes;
  return nic.capability == Capability::mlx5 && is_virtual_machine({});
}

NicAccess open_nic(const NicAssignment& assignment, const Executor& executor, const RdmaSettings& settings,
                   const SymmetricHeap& heap) {
  NicAccess access;
  access.nic = assignment;
  access.relaxed_ordering = relaxes_ordering(settings, assignment.nic);
  if (executor.device().kind == deep_ep::Device::Kind::cuda) {
    access.gpu = gpu_access(executor.device().index);
    if (!settings.dma_buf) access.gpu->export_dma_buf = {};
  }
  access.device = access.open(assignment.nic.name, path_by(settings, assignment), verbs_functions(), heap);
  return access;
}

std::unique_ptr<Ends> make_nic_ends(NicHandler handler, NicAccess& nic, const std::shared_ptr<Executor>& executor,
                                    const ConnectionOptions& options) {
  if (handler == NicHandler::cpu) return make_verbs_ends(nic, executor, options);
  try {
    return make_devx_ends(handler, nic, executor, options);
  } catch (const Error& error) {
    fail<SystemError>("DEEP_EP_NIC_HANDLER={} is impossible here: {}", name_of(handler), error.what());
  }
}

NicEnds::NicEnds(const NicAccess& nic, const ConnectionOptions& options)
    : Ends(options, nic.nic.name()), nic_(nic), landings_(options.ends()) {
  if (options.rail_width == 0) nic_.landing_nics.clear();  // ends keep what they have
  for (std::size_t end = 0; end < options.ends(); ++end) {
    if (!options.lands(end)) continue;
    const auto rail = static_cast<std::size_t>(options.rail_of(options.peer(end)));
    landings_[end].emplace(nic_.landing_nics.at(rail));
  }
}

}  // namespace deep_ep::rdma::verbs
