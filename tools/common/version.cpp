#include "tools/common/version.hpp"

#include <fmt/format.h>
#include <deep_ep_build_info.hpp>  // made by the build

#include "deep_ep/version.hpp"

namespace deep_ep::tools {

std::string full_version() {
  const std::string hash = DEEP_EP_GIT_HASH;
  return hash.empty() ? DEEP_EP_VERSION : fmt::format("{}-g{}", DEEP_EP_VERSION, hash);
}

std::vector<std::pair<std::string, std::string>> build_facts() {
  const bool cuda = DEEP_EP_HAVE_CUDA;
  std::string transports = "shared memory, ";
  if (cuda) transports += "NVLink, ";
  transports += "RDMA by verbs (rdma-core is loaded when needed), local and simulated wires";
  std::string bootstraps = "threads, TCP";
  if (DEEP_EP_HAVE_MPI) bootstraps += ", MPI";
  if (DEEP_EP_HAVE_NCCL) bootstraps += ", NCCL";
  return {
      {"cuda", cuda ? DEEP_EP_CUDA_COMPILER_VERSION : "none: kernels run on the CPU"},
      {"gpu code", cuda ? DEEP_EP_CUDA_CODE : "none"},
      {"transports", transports},
      {"bootstraps", bootstraps},
      {"compiler", DEEP_EP_CXX_COMPILER},
  };
}

std::string version_text() {
  std::string text = full_version();
  for (const auto& [name, fact] : build_facts()) text += fmt::format("\n  {:<12}{}", name, fact);
  return text;
}

}  // namespace deep_ep::tools
