#include "csrc/rdma/verbs/registration.hpp"

#include <sys/resource.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {
namespace {

/// Peers write and add; nothing reads remotely.
constexpr int kAccess = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC;

std::uint64_t start_of(const MemoryRange& range) {
  return range.first_address.value_or(reinterpret_cast<std::uint64_t>(range.address));
}

void check(const MemoryRange& range) {
  if (range.address == nullptr || range.bytes == 0) {
    fail<InvalidArgument>("memory to register: {} bytes at {}, allowed: at least one byte, not at a null address",
                          range.bytes, range.address);
  }
}

/// errno tells a failure.
ibv_mr* register_by_address(const Device& device, const MemoryRange& range) {
  errno = 0;
  return device.functions().reg_mr_iova2(device.protection_domain(), range.address, range.bytes, start_of(range),
                                         static_cast<unsigned>(kAccess));
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

/// A region, or why there is none.
struct Attempt {
  ibv_mr* region = nullptr;
  std::string failure;
};

Attempt register_dma_buf(const Device& device, const MemoryRange& range, const DmaBufExporter& exporter) {
  if (!exporter) return {nullptr, "the GPU's driver offers no export"};
  const VerbsFunctions& functions = device.functions();
  if (functions.reg_dmabuf_mr == nullptr) {
    return {nullptr, "libibverbs has no ibv_reg_dmabuf_mr (rdma-core 34 or later has)"};
  }
  try {
    // The kernel keeps the dma-buf alive; the descriptor may go at the end of this block.
    const UniqueFd descriptor = exporter(range.address, range.bytes);
    errno = 0;
    ibv_mr* region =
        functions.reg_dmabuf_mr(device.protection_domain(), 0, range.bytes, start_of(range), descriptor.get(), kAccess);
    return {region, region != nullptr ? std::string() : "ibv_reg_dmabuf_mr: " + explain(errno)};
  } catch (const Error& error) {
    return {nullptr, error.what()};
  }
}

bool peer_memory_module_loaded() {
  std::error_code ignored;
  return std::filesystem::exists("/sys/module/nvidia_peermem", ignored) ||
         std::filesystem::exists("/sys/kernel/mm/memory_peers/nv_mem", ignored);
}

}  // namespace

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
  check(range);
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
  check(range);
  const auto made = [&](ibv_mr* region, RegistrationPath path) {
    return Registration(std::move(device), region, range, path);
  };
  const Attempt attempt = register_dma_buf(*device, range, exporter);
  if (attempt.region != nullptr) return made(attempt.region, RegistrationPath::dma_buf);
  log::info("RDMA device {}: no dma-buf registration ({}), trying peer memory", device->name(), attempt.failure);

  ibv_mr* region = register_by_address(*device, range);
  if (region != nullptr) return made(region, RegistrationPath::peer_memory);
  const int refusal = errno;
  fail<SystemError>(
      "RDMA device {}: {} of GPU memory at {} cannot be registered. Tried: dma-buf: {}; peer memory: ibv_reg_mr: {}, "
      "nvidia-peermem is {}",
      device->name(), format_bytes(range.bytes), range.address, attempt.failure, explain(refusal),
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
