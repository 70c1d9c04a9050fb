#include "csrc/rdma/ring/handler_choice.hpp"

#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {

NicHandlerKind choose_nic_handler(std::string_view wanted, const std::function<std::string()>& why_not_gpu) {
  if (wanted != "auto" && wanted != "gpu" && wanted != "cpu") {
    fail<InvalidArgument>("NIC handler '{}', allowed: auto, gpu or cpu", wanted);
  }
  if (wanted == "cpu") return NicHandlerKind::cpu;
  const std::string why_not = why_not_gpu();
  if (why_not.empty()) return NicHandlerKind::gpu;
  if (wanted == "gpu") fail<SystemError>("DEEP_EP_NIC_HANDLER=gpu is impossible here: {}", why_not);
  log::warn("RDMA: a CPU thread executes what kernels post (DEEP_EP_NIC_HANDLER=cpu), because: {}", why_not);
  return NicHandlerKind::cpu;
}

}  // namespace deep_ep::rdma
