#include "csrc/rdma/verbs/nic_access.hpp"

#include "csrc/rdma/discovery/settings.hpp"
#include "csrc/rdma/verbs/dma_buf.hpp"
#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::rdma::verbs {

DmaBufExporter exporter_by(const RdmaSettings& settings) {
  if (settings.dma_buf) return gpu_dma_buf_exporter();
  return [](void*, std::size_t) -> UniqueFd {
    throw SystemError("turned off by NVSHMEM_IB_DISABLE_DMABUF or NCCL_DMABUF_ENABLE");
  };
}

Registration NicAccess::register_heap(void* address, std::size_t bytes) const {
  const MemoryRange range{.address = address, .bytes = bytes, .first_address = 0};
  return gpu_memory ? Registration::of_gpu_memory(device, range, Ordering::strict, exporter)
                    : Registration::of_host_memory(device, range, Ordering::strict);
}

NicAccess open_nic(const NicAssignment& assignment, const Executor& executor, const RdmaSettings& settings) {
  NicAccess access;
  access.device = Device::open(assignment.nic);
  access.path = path_options(settings, assignment.port, assignment.gid_index);
  access.name = fmt::format("{}:{}", assignment.nic, assignment.port);
  access.mlx5 = assignment.capability == Capability::mlx5;
  access.gpu_memory = executor.device().kind == deep_ep::Device::Kind::cuda;
  access.handler = settings.nic_handler;
  access.exporter = exporter_by(settings);
  access.mlx5_functions = []() -> const Mlx5Functions& { return mlx5_functions(); };
  access.make_registrar = [ordinal = executor.device().index] { return make_cuda_page_registrar(ordinal); };
  return access;
}

}  // namespace deep_ep::rdma::verbs
