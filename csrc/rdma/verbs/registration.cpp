#include "csrc/rdma/verbs/registration.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <string>

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

std::size_t host_page_bytes() { return static_cast<std::size_t>(::sysconf(_SC_PAGESIZE)); }

const char* register_memory(const std::string& device, const MemoryRange& range, const char* name,
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
    fail<SystemError>("RDMA device {}: {} of {} of CPU memory at {}: {}", device, name, format_bytes(range.bytes),
                      range.address, why_not);
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
  log::info("RDMA device {}: no dma-buf registration ({}), trying peer memory", device, no_dma_buf);
  const std::string no_peer_memory = refusal(kByAddress);
  if (no_peer_memory.empty()) return "peer memory";
  fail<SystemError>(
      "RDMA device {}: {} of {} of GPU memory at {}. Tried: dma-buf (needs Linux 5.12, for rings 6.1): {}; peer "
      "memory: {}, nvidia-peermem is {}",
      device, name, format_bytes(range.bytes), range.address, no_dma_buf, no_peer_memory,
      peer_memory_module_loaded() ? "loaded" : "not loaded");
}

}  // namespace deep_ep::rdma::verbs
