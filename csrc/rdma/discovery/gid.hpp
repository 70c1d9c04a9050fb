// GIDs: the addresses of a port of an RDMA device, and which of them to use.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace deep_ep::rdma {

/// A GID as it travels.
using GidBytes = std::array<std::uint8_t, 16>;

enum class GidType : std::uint8_t {
  infiniband,  ///< on InfiniBand ports
  roce_v1,     ///< Ethernet frames, not routed
  roce_v2,     ///< UDP/IP
  unknown,     ///< the kernel did not say
};

struct GidEntry {
  int index = 0;
  GidBytes bytes{};
  GidType type = GidType::unknown;
  std::string netdev = {};  ///< the network interface it comes from ("eth3"); empty on InfiniBand

  bool is_zero() const;
  bool is_link_local() const;       ///< fe80::/10
  bool is_ipv4_mapped() const;      ///< ::ffff:a.b.c.d
  bool is_ipv4_link_local() const;  ///< ::ffff:169.254.c.d
  std::string address() const;      ///< "10.0.0.1", "2001:db8::1"
};

/// Sixteen bytes of "0000:0000:0000:0000:0000:ffff:0a00:0001", as sysfs writes them.
std::optional<GidBytes> parse_gid(std::string_view text);

/// What the operator wants. An index wins over the rest.
struct GidPolicy {
  std::optional<int> index = {};
  std::string index_source = {};  ///< the variable that set it
  bool index_is_binding = false;  ///< an unusable index is an error, not a warning and an automatic choice
};

struct GidChoice {
  std::optional<GidEntry> gid = {};
  std::string problem = {};  ///< why there is none; otherwise empty
  std::string warning = {};  ///< what is unusual about the chosen one
};

/// Ethernet: RoCE v2 only; IPv4 first, then global IPv6, then IPv4 of 169.254.0.0/16, which machines on one cable give
/// themselves; the lowest index of the best kind. Zero and fe80:: GIDs are never chosen (the former have no address,
/// the latter reach only one cable), nor is RoCE v1 (not routed, and peers would have to agree on it). InfiniBand: the
/// first GID that is not zero, which carries the subnet's prefix, fe80:: or not. An index that the policy gives may
/// name any GID that is not zero.
GidChoice choose_gid(const std::vector<GidEntry>& gids, bool ethernet, const GidPolicy& policy);

const char* name_of(GidType type);  ///< "RoCE v2"

}  // namespace deep_ep::rdma
