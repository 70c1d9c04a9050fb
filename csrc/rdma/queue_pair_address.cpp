#include "csrc/rdma/queue_pair_address.hpp"

#include <cstring>

#include "csrc/support/format.hpp"
#include "deep_ep/bootstrap.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma {

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
}

std::vector<QueuePairAddress> exchange_addresses(Bootstrap& bootstrap, int channels, std::span<const int> peers,
                                                 std::span<const QueuePairAddress> mine) {
  // Every rank tells all: a table [channels][ranks].
  const auto count = static_cast<std::size_t>(channels) * static_cast<std::size_t>(bootstrap.size());
  const auto place = [&](int channel, int rank) { return static_cast<std::size_t>(channel * bootstrap.size() + rank); };
  std::vector<QueuePairAddress> table(count);
  std::size_t end = 0;
  for (int channel = 0; channel < channels; ++channel) {
    for (const int peer : peers) table[place(channel, peer)] = mine[end++];
  }
  const std::vector<std::byte> bytes = bootstrap.all_gather(std::as_bytes(std::span(table)));
  std::vector<QueuePairAddress> all(count * static_cast<std::size_t>(bootstrap.size()));
  std::memcpy(static_cast<void*>(all.data()), bytes.data(), bytes.size());
  std::vector<QueuePairAddress> theirs;
  for (int channel = 0; channel < channels; ++channel) {
    for (const int peer : peers) {
      theirs.push_back(all[static_cast<std::size_t>(peer) * count + place(channel, bootstrap.rank())]);
    }
  }
  return theirs;
}

}  // namespace deep_ep::rdma
