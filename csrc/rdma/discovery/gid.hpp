// GIDs: the addresses of a port of an RDMA device, and which of them to use.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include "csrc/support/environment.hpp"

namespace deep_ep::rdma {

struct NicPort;

/// A GID as it travels.
using GidBytes = std::array<std::uint8_t, 16>;

struct GidEntry {
  int index = 0;
  GidBytes bytes{};
  std::string type =
      {};  ///< "RoCE v2" (UDP/IP), "IB/RoCE v1" (Ethernet frames, not routed), "InfiniBand"; may be empty
  std::string netdev = {};  ///< the network interface it comes from ("eth3"); empty on InfiniBand

  bool is_zero() const;
  bool is_ipv4_mapped() const;  ///< ::ffff:a.b.c.d
  std::string address() const;  ///< "10.0.0.1", "2001:db8::1"
  std::string text() const;     ///< "GID 3 (RoCE v2, 10.0.0.1, eth3)"
};

/// Sixteen bytes of "0000:0000:0000:0000:0000:ffff:0a00:0001", as sysfs writes them.
std::optional<GidBytes> parse_gid(std::string_view text);

struct GidChoice {
  std::optional<GidEntry> gid = {};
  std::string problem = {};  ///< why there is none, or what is unusual about it; otherwise empty
};

/// Of GIDs that are not zero. Ethernet: RoCE v2 only; IPv4 first, then global IPv6, then IPv4 of 169.254.0.0/16, which
/// machines on one cable give themselves; the lowest index of the best kind. GIDs of fe80:: are never chosen, which
/// reach only one cable, nor is RoCE v1 (not routed, and peers would have to agree on it). InfiniBand: the
/// first GID that is not zero, which carries the subnet's prefix, fe80:: or not. `index`, if it is not auto, may name
/// any GID that is not zero; if none is there, that is a problem where the library's own variable says so, else a
/// warning.
GidChoice choose_gid(const NicPort& port, const environment::Value& index);

}  // namespace deep_ep::rdma
