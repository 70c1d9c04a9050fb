#include "csrc/rdma/queue_pair_address.hpp"

#include <array>

#include "csrc/support/format.hpp"

namespace deep_ep::rdma {

std::string_view to_string(LinkLayer link_layer) {
  constexpr std::array<std::string_view, 3> kNames = {"no network", "InfiniBand", "Ethernet"};
  const auto number = static_cast<std::size_t>(link_layer);  // may be a peer's
  return kNames[number < kNames.size() ? number : 0];
}

std::string to_string(const QueuePairAddress& address) {
  return fmt::format("queue pair {:#x} at GID {} LID {} ({})", address.queue_pair,
                     GidEntry{.bytes = address.gid}.address(), address.lid, to_string(address.link_layer));
}

void check_compatible(const std::string& device, const QueuePairAddress& own, const QueuePairAddress& peer) {
  if (peer.link_layer != own.link_layer) {
    fail<RankMismatch>("RDMA device {} is {}, the peer is {}: give every rank a device of the same fabric", device,
                       to_string(own.link_layer), to_string(peer.link_layer));
  }
  const GidEntry own_gid{.bytes = own.gid};
  const GidEntry peer_gid{.bytes = peer.gid};
  if (own.link_layer == LinkLayer::ethernet && own_gid.is_ipv4_mapped() != peer_gid.is_ipv4_mapped()) {
    fail<RankMismatch>(
        "RDMA device {}: GID {} here and GID {} of the peer are of different families (IPv4, IPv6): "
        "choose the same kind of GID on all ranks",
        device, own_gid.address(), peer_gid.address());
  }
}

}  // namespace deep_ep::rdma
