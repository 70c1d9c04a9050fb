#include "csrc/rdma/ring/nic_handler.hpp"

#include "deep_ep/error.hpp"

namespace deep_ep::rdma {

std::string_view name_of(NicHandlerKind kind) { return kind == NicHandlerKind::gpu ? "gpu" : "cpu"; }

void NicHandler::check() const {
  if (const std::optional<Failure> seen = failure()) throw SystemError(describe(*seen));
}

}  // namespace deep_ep::rdma
