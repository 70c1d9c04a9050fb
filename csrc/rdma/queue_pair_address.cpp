#include "csrc/rdma/queue_pair_address.hpp"

#include <algorithm>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {

namespace {

bool has_floating_lid(const GidBytes& gid) { return gid[0] == 0xfe && gid[1] == 0xc0 && (gid[4] != 0 || gid[5] != 0); }

// The prefix names the subnet, but for the two bytes of a floating LID.
bool same_subnet(const GidBytes& a, const GidBytes& b) {
  return std::equal(a.begin(), a.begin() + 4, b.begin()) && std::equal(a.begin() + 6, a.begin() + 8, b.begin() + 6) &&
         (has_floating_lid(a) || has_floating_lid(b) || std::equal(a.begin() + 4, a.begin() + 6, b.begin() + 4));
}

bool both_have_gids(const QueuePairAddress& own, const QueuePairAddress& peer) {
  return !GidEntry{.bytes = own.gid}.is_zero() && !GidEntry{.bytes = peer.gid}.is_zero();
}

}  // namespace

std::string_view to_string(LinkLayer link_layer) {
  switch (link_layer) {
    case LinkLayer::ethernet:
      return "Ethernet";
    case LinkLayer::infiniband:
      return "InfiniBand";
    case LinkLayer::none:
      break;
  }
  return "no network";
}

std::string to_string(const QueuePairAddress& address) {
  return fmt::format("queue pair {:#x} at GID {} LID {} ({})", address.queue_pair,
                     GidEntry{.bytes = address.gid}.address(), address.lid, to_string(address.link_layer));
}

void check_compatible(const std::string& device, const QueuePairAddress& own, const QueuePairAddress& peer) {
  if (peer.format != own.format) {
    fail<RankMismatch>(
        "RDMA device {}: the peer's address has format {}, this library speaks {}: the ranks run "
        "different versions",
        device, peer.format, own.format);
  }
  if (peer.link_layer != own.link_layer) {
    fail<RankMismatch>("RDMA device {} is {}, the peer is {}: give every rank a device of the same fabric", device,
                       to_string(own.link_layer), to_string(peer.link_layer));
  }
  if (peer.mtu < 1 || peer.mtu > 5) {
    fail<RankMismatch>("RDMA device {}: the peer's MTU code is {}, allowed: 1 to 5", device, peer.mtu);
  }
  const GidEntry own_gid{.bytes = own.gid};
  const GidEntry peer_gid{.bytes = peer.gid};
  if (own.link_layer == LinkLayer::ethernet && own_gid.is_ipv4_mapped() != peer_gid.is_ipv4_mapped()) {
    fail<RankMismatch>(
        "RDMA device {}: GID {} here and GID {} of the peer are of different families (IPv4, IPv6): "
        "choose the same kind of GID on all ranks",
        device, own_gid.address(), peer_gid.address());
  }
  if (has_global_route(own, peer) && !both_have_gids(own, peer)) {
    fail<RankMismatch>(
        "RDMA device {}: its port or the peer's needs a global route, but GID {} here or {} of the peer is empty: "
        "choose another index (DEEP_EP_RDMA_GID_INDEX)",
        device, own_gid.address(), peer_gid.address());
  }
}

bool has_global_route(const QueuePairAddress& own, const QueuePairAddress& peer) {
  return own.link_layer == LinkLayer::ethernet || own.needs_global_route != 0 || peer.needs_global_route != 0 ||
         (both_have_gids(own, peer) && !same_subnet(own.gid, peer.gid));
}

std::uint16_t destination_lid(const QueuePairAddress& own, const QueuePairAddress& peer) {
  const bool by_router = both_have_gids(own, peer) && !same_subnet(own.gid, peer.gid) && has_floating_lid(peer.gid);
  return by_router ? static_cast<std::uint16_t>(peer.gid[4] << 8 | peer.gid[5]) : peer.lid;
}

}  // namespace deep_ep::rdma
