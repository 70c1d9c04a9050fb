#include "csrc/rdma/verbs/nic_ends.hpp"

#include <utility>
#include <vector>

#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::rdma::verbs {

DmaBufExporter exporter_by(const RdmaSettings& settings) {
  if (settings.dma_buf) return gpu_dma_buf_exporter();
  return [](void*, std::size_t) -> UniqueFd {
    throw SystemError("turned off by NVSHMEM_IB_DISABLE_DMABUF or NCCL_DMABUF_ENABLE");
  };
}

PathOptions path_by(const RdmaSettings& settings, const NicAssignment& assignment) {
  PathOptions path = settings.path;
  path.port = assignment.port;
  path.gid_index = assignment.gid.index;
  if (!settings.has_traffic_class) path.traffic_class = assignment.of_port().traffic_class.value_or(path.traffic_class);
  return path;
}

bool relaxes_ordering(const RdmaSettings& settings, const NicAssignment& assignment) {
  if (settings.relaxed_ordering != Choice::automatic) return settings.relaxed_ordering == Choice::yes;
  return assignment.nic.capability == Capability::mlx5 && is_virtual_machine({});
}

NicAccess open_nic(const NicAssignment& assignment, const Executor& executor, const RdmaSettings& settings) {
  NicAccess access;
  access.nic = assignment;
  access.device = std::make_shared<Device>(assignment.nic.name, verbs_functions());
  access.path = path_by(settings, assignment);
  access.gpu_memory = executor.device().kind == deep_ep::Device::Kind::cuda;
  access.handler = settings.nic_handler;
  if (access.gpu_memory) access.keeps_order_of_writes = gpu_keeps_order_of_writes(executor.device().index);
  access.exporter = exporter_by(settings);
  access.relaxed_ordering = relaxes_ordering(settings, assignment);
  access.mlx5_functions = []() -> const Mlx5Functions& { return mlx5_functions(); };
  access.page_mapper = gpu_page_mapper(executor.device().index);
  return access;
}

HeapRegistration register_heap(const NicAccess& nic, const std::shared_ptr<Device>& device, const SymmetricHeap& heap) {
  MemoryRange range{.address = heap.local(),
                    .bytes = heap.bytes(),
                    .gpu = nic.gpu_memory ? &nic.exporter : nullptr,
                    .first_address = 0};
  const Registration signals(device, range);
  range.any_order = nic.relaxed_ordering;
  return {signals, nic.relaxed_ordering ? Registration(device, range) : signals};
}

std::unique_ptr<Ends> make_nic_ends(const NicAccess& nic, const std::shared_ptr<Executor>& executor,
                                    const SymmetricHeap& heap, const ConnectionOptions& options) {
  if (nic.gpu_memory && !nic.keeps_order_of_writes) {
    fail<SystemError>(
        "NIC {} cannot serve this GPU: the GPU does not keep the order of what NICs write (attribute "
        "GPU_DIRECT_RDMA_WRITES_ORDERING is 0), so that a signal could be seen before its data",
        nic.nic.name());
  }
  const HeapRegistration registration = register_heap(nic, nic.device, heap);
  const bool any = nic.handler == NicHandler::automatic || nic.or_next;
  std::vector<std::string> refusals;
  for (const NicHandler handler : {NicHandler::gpu, NicHandler::doorbell}) {
    // For kernels on the CPU there is nothing to try, and nothing to warn of.
    if (handler != nic.handler && (!any || !nic.gpu_memory || handler < nic.handler)) continue;
    try {
      std::unique_ptr<Ends> ends = make_devx_ends(handler, nic, executor, registration, options);
      if (!refusals.empty()) warn_of_handler(handler, fmt::format("{}", fmt::join(refusals, "; ")));
      return ends;
    } catch (const Error& error) {
      if (!any) fail<SystemError>("DEEP_EP_NIC_HANDLER={} is impossible here: {}", name_of(handler), error.what());
      if (refusals.empty() || refusals.back() != error.what()) refusals.emplace_back(error.what());
    }
  }
  if (!refusals.empty()) warn_of_handler(NicHandler::cpu, fmt::format("{}", fmt::join(refusals, "; ")));
  return make_verbs_ends(nic, executor, registration, options);
}

void warn_of_handler(NicHandler handler, const std::string& why) {
  log::warn("RDMA: a CPU thread {} (DEEP_EP_NIC_HANDLER={}), because: {}",
            handler == NicHandler::cpu ? "executes what kernels post" : "rings the NIC for kernels", name_of(handler),
            why);
}

NicEnds::NicEnds(const NicAccess& nic, HeapRegistration heap, const ConnectionOptions& options)
    : nic_(nic), heap_(std::move(heap)), options_(options), landings_(options.ends()) {
  for (std::size_t end = 0; end < options.ends(); ++end) {
    if (!options.lands(end, nic.rank)) continue;
    const auto rail = static_cast<std::size_t>(options.rail_of(options.peer(end)));
    const LandingNic& by = nic.landing_nics->of_rail.at(rail).value();
    landings_[end].emplace(by, by.path);
  }
}

void NicEnds::make_rings(const std::shared_ptr<Executor>& executor, RingOptions shape) {
  shape.count = options_.ends();
  shape.depth = options_.depth;
  shape.batch = options_.batch;
  sinks_.reset();
  rings_.emplace(executor, shape);
  sinks_.emplace(nic_.device, MemoryRange{.address = rings_->sinks(), .bytes = rings_->sink_bytes()});
}

RdmaPeerParams NicEnds::params_of(std::size_t end, RdmaQueuePair queue, const QueuePairAddress& peer) const {
  queue.sink = {sinks_->first_address() + sizeof(std::uint64_t) * end, sinks_->local_key()};
  return {queue, heap_.payload.local_key(), peer.heap_key, peer.signal_key};
}

}  // namespace deep_ep::rdma::verbs
