#include "csrc/rdma/verbs/registration.hpp"

#include <sys/resource.h>

#include <cerrno>
#include <filesystem>
#include <string>
#include <utility>

#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep::rdma::verbs {
namespace {

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

const char* register_memory(const Device& device, const MemoryRange& range, const char* name,
                            const std::function<bool(int dma_buf)>& call) {
  /// Why not; empty: it has it.
  const auto refusal = [&](int dma_buf) {
    errno = 0;
    return call(dma_buf) ? std::string() : explain(errno);
  };
  constexpr int kByAddress = -1;
  if (range.gpu == nullptr) {
    const std::string why_not = refusal(kByAddress);
    if (why_not.empty()) return "host memory";
    fail<SystemError>("RDMA device {}: {} of {} of CPU memory at {}: {}", device.name(), name,
                      format_bytes(range.bytes), range.address, why_not);
  }
  std::string no_dma_buf;
  try {
    if (!*range.gpu) throw SystemError("turned off by NVSHMEM_IB_DISABLE_DMABUF or NCCL_DMABUF_ENABLE");
    // The kernel keeps the dma-buf alive; the descriptor may go at the end of this block.
    const UniqueFd descriptor = (*range.gpu)(range.address, range.bytes);
    no_dma_buf = refusal(descriptor.get());
    if (no_dma_buf.empty()) return "dma-buf";
  } catch (const Error& error) {
    no_dma_buf = error.what();
  }
  log::info("RDMA device {}: no dma-buf registration ({}), trying peer memory", device.name(), no_dma_buf);
  const std::string no_peer_memory = refusal(kByAddress);
  if (no_peer_memory.empty()) return "peer memory";
  fail<SystemError>(
      "RDMA device {}: {} of {} of GPU memory at {}. Tried: dma-buf (needs Linux 5.12, for rings 6.1): {}; peer "
      "memory: {}, nvidia-peermem is {}",
      device.name(), name, format_bytes(range.bytes), range.address, no_dma_buf, no_peer_memory,
      peer_memory_module_loaded() ? "loaded" : "not loaded");
}

Registration::Registration(std::shared_ptr<Device> device, const MemoryRange& range) {
  const VerbsFunctions& functions = device->functions();
  ibv_pd* const domain = device->protection_domain();
  // Peers write and add; nothing reads remotely.
  const int access = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                     (range.any_order ? IBV_ACCESS_RELAXED_ORDERING : IBV_ACCESS_REMOTE_ATOMIC);
  ibv_mr* made = nullptr;
  path = register_memory(*device, range, "ibv_reg_mr", [&](int dma_buf) {
    made = dma_buf >= 0 ? functions.reg_dmabuf_mr(domain, 0, range.bytes, 0, dma_buf, access)
                        : functions.reg_mr_iova2(domain, range.address, range.bytes, 0, static_cast<unsigned>(access));
    return made != nullptr;
  });
  region = owned(std::move(device), made, functions.dereg_mr, "ibv_dereg_mr");
}

}  // namespace deep_ep::rdma::verbs
