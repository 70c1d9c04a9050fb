#include "csrc/rdma/verbs/registration.hpp"

#include <sys/resource.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <utility>

#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {
namespace {

/// Peers write and add; nothing reads remotely.
int access_to(const MemoryRange& range) {
  return IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
         (range.any_order ? IBV_ACCESS_RELAXED_ORDERING : IBV_ACCESS_REMOTE_ATOMIC);
}

std::uint64_t start_of(const MemoryRange& range) {
  return range.first_address.value_or(reinterpret_cast<std::uint64_t>(range.address));
}

/// errno tells a failure.
ibv_mr* register_by_address(const Device& device, const MemoryRange& range) {
  errno = 0;
  return device.functions().reg_mr_iova2(device.protection_domain(), range.address, range.bytes, start_of(range),
                                         static_cast<unsigned>(access_to(range)));
}

std::string locked_memory_limit() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_MEMLOCK, &limit) != 0) return "unknown";
  return limit.rlim_cur == RLIM_INFINITY ? "unlimited" : format_bytes(limit.rlim_cur);
}

std::string explain(int error) {
  std::string text = errno_text(error);
  if (error == ENOMEM) text += fmt::format(", locked memory is limited to {} (ulimit -l)", locked_memory_limit());
  return text;
}

bool peer_memory_module_loaded() {
  std::error_code ignored;
  return std::filesystem::exists("/sys/module/nvidia_peermem", ignored) ||
         std::filesystem::exists("/sys/kernel/mm/memory_peers/nv_mem", ignored);
}

}  // namespace

std::string by_dma_buf(const MemoryRange& range, const DmaBufExporter& exporter,
                       const std::function<std::string(int descriptor)>& use) {
  if (!exporter) return "the GPU's driver offers no export";
  try {
    // The kernel keeps the dma-buf alive; the descriptor may go at the end of this block.
    const UniqueFd descriptor = exporter(range.address, range.bytes);
    errno = 0;
    return use(descriptor.get());
  } catch (const Error& error) {
    return error.what();
  }
}

std::string_view to_string(RegistrationPath path) {
  switch (path) {
    case RegistrationPath::host:
      return "host memory";
    case RegistrationPath::dma_buf:
      return "dma-buf";
    case RegistrationPath::peer_memory:
      return "peer memory";
  }
  return "unknown";
}

Registration Registration::of_host_memory(std::shared_ptr<Device> device, const MemoryRange& range) {
  ibv_mr* region = register_by_address(*device, range);
  if (region == nullptr) {
    const int refusal = errno;
    fail<SystemError>("RDMA device {}: ibv_reg_mr of {} of CPU memory at {}: {}", device->name(),
                      format_bytes(range.bytes), range.address, explain(refusal));
  }
  return Registration(std::move(device), region, range, RegistrationPath::host);
}

Registration Registration::of_gpu_memory(std::shared_ptr<Device> device, const MemoryRange& range,
                                         const DmaBufExporter& exporter) {
  ibv_mr* region = nullptr;
  const std::string failure = by_dma_buf(range, exporter, [&](int descriptor) {
    region = device->functions().reg_dmabuf_mr(device->protection_domain(), 0, range.bytes, start_of(range), descriptor,
                                               access_to(range));
    return region != nullptr ? std::string() : "ibv_reg_dmabuf_mr: " + explain(errno);
  });
  if (failure.empty()) return Registration(std::move(device), region, range, RegistrationPath::dma_buf);
  log::info("RDMA device {}: no dma-buf registration ({}), trying peer memory", device->name(), failure);

  region = register_by_address(*device, range);
  if (region != nullptr) return Registration(std::move(device), region, range, RegistrationPath::peer_memory);
  const int refusal = errno;
  fail<SystemError>(
      "RDMA device {}: {} of GPU memory at {} cannot be registered. Tried: dma-buf: {}; peer memory: ibv_reg_mr: {}, "
      "nvidia-peermem is {}",
      device->name(), format_bytes(range.bytes), range.address, failure, explain(refusal),
      peer_memory_module_loaded() ? "loaded" : "not loaded");
}

Registration::Registration(std::shared_ptr<Device> device, ibv_mr* region, const MemoryRange& range,
                           RegistrationPath path)
    : region_(region,
              [device = std::move(device)](ibv_mr* gone) {
                const int error = device->functions().dereg_mr(gone);
                if (error != 0) log::warn("RDMA device {}: ibv_dereg_mr: {}", device->name(), errno_text(error));
              }),
      first_address_(start_of(range)),
      path_(path) {}

std::uint32_t Registration::local_key() const { return region_->lkey; }
std::uint32_t Registration::remote_key() const { return region_->rkey; }

}  // namespace deep_ep::rdma::verbs
