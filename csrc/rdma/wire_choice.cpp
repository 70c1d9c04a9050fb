#include "csrc/rdma/wire_choice.hpp"

#include <algorithm>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {

WireKind choose_wire(std::span<const WireFacts> ranks, std::string& why_local) {
  const WireKind wanted = ranks[0].wanted.kind;
  const auto first = std::find_if(ranks.begin(), ranks.end(), [](const WireFacts& rank) { return rank.needs_rdma; });
  std::size_t elsewhere = ranks.size();
  std::size_t without_nic = ranks.size();
  bool needs_gpu_handler = false;
  bool needs_cpu_handler = false;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].wanted.kind != wanted) {
      fail<RankMismatch>("DEEP_EP_RDMA_WIRE is {} on rank 0 but {} on rank {}; it must be equal on all ranks",
                         name_of(wanted), name_of(ranks[rank].wanted.kind), rank);
    }
    if (ranks[rank].wanted.nic != ranks[0].wanted.nic) {
      fail<RankMismatch>("DEEP_EP_RDMA_WIRE is simulated with other keys on rank 0 than on rank {}; they must be equal",
                         rank);
    }
    if (!ranks[rank].needs_rdma) continue;
    needs_gpu_handler |= ranks[rank].handler == NicHandler::gpu;
    needs_cpu_handler |= ranks[rank].handler == NicHandler::cpu;
    if (elsewhere == ranks.size() && !ranks[rank].process.same_host(first->process)) elsewhere = rank;
    if (without_nic == ranks.size() && ranks[rank].why_no_nic[0] != '\0') without_nic = rank;
  }
  if (first == ranks.end()) return WireKind::local;
  if (wanted == WireKind::local || wanted == WireKind::simulated) {
    if (elsewhere != ranks.size()) {
      fail<SystemError>(
          "DEEP_EP_RDMA_WIRE={} is impossible: rank {} (host {}) and rank {} (host {}) are not on one host",
          name_of(wanted), first - ranks.begin(), first->process.host.data(), elsewhere,
          ranks[elsewhere].process.host.data());
    }
    if (wanted == WireKind::local && needs_gpu_handler) {
      throw SystemError("DEEP_EP_NIC_HANDLER=gpu is impossible with DEEP_EP_RDMA_WIRE=local: no NIC");
    }
    if (wanted == WireKind::simulated && needs_cpu_handler) {
      throw SystemError("DEEP_EP_NIC_HANDLER=cpu is impossible with DEEP_EP_RDMA_WIRE=simulated: kernels ring it");
    }
    return wanted;
  }
  if (without_nic == ranks.size()) return WireKind::verbs;
  const char* why = ranks[without_nic].why_no_nic.data();
  if (wanted == WireKind::automatic && elsewhere == ranks.size() && !needs_gpu_handler) {
    why_local = fmt::format("rank {} (host {}): {}", without_nic, ranks[without_nic].process.host.data(), why);
    return WireKind::local;
  }
  fail<SystemError>("rank {} (host {}): {}", without_nic, ranks[without_nic].process.host.data(), why);
}

}  // namespace deep_ep::rdma
