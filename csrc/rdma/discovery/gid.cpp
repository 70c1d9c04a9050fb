#include "csrc/rdma/discovery/gid.hpp"

#include <arpa/inet.h>

#include <algorithm>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"

namespace deep_ep::rdma {
namespace {

constexpr std::array<std::uint8_t, 12> kIpv4Prefix = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

std::optional<GidBytes> parse_address(const std::string& text, bool& ipv4) {
  GidBytes bytes{};
  std::copy(kIpv4Prefix.begin(), kIpv4Prefix.end(), bytes.begin());
  ipv4 = ::inet_pton(AF_INET, text.c_str(), bytes.data() + kIpv4Prefix.size()) == 1;
  if (ipv4 || ::inet_pton(AF_INET6, text.c_str(), bytes.data()) == 1) return bytes;
  return std::nullopt;
}

std::string describe(const GidEntry& gid) {
  return fmt::format("GID {} ({}, {})", gid.index, name_of(gid.type), gid.address());
}

// Smaller is better; nothing for a GID that must not be used unless it is asked for.
std::optional<int> rank_on_ethernet(const GidEntry& gid, const GidPolicy& policy) {
  if (gid.is_zero() || gid.is_link_local() || gid.type != GidType::roce_v2) return std::nullopt;
  if (policy.range && !policy.range->contains(gid.bytes)) return std::nullopt;
  if (policy.family == GidPolicy::Family::ipv4 && !gid.is_ipv4_mapped()) return std::nullopt;
  if (policy.family == GidPolicy::Family::ipv6 && gid.is_ipv4_mapped()) return std::nullopt;
  if (gid.is_ipv4_link_local()) return 2;
  return gid.is_ipv4_mapped() ? 0 : 1;
}

std::string why_none(const std::vector<GidEntry>& gids, bool ethernet, const GidPolicy& policy) {
  if (std::all_of(gids.begin(), gids.end(), [](const GidEntry& gid) { return gid.is_zero(); })) {
    return "all GIDs are zero";
  }
  if (!ethernet) return "no usable GID";
  std::string wanted = "RoCE v2 GID with a routable address";
  if (policy.family != GidPolicy::Family::any) {
    wanted += policy.family == GidPolicy::Family::ipv4 ? ", IPv4" : ", IPv6";
  }
  if (policy.range) wanted += fmt::format(", in {}", policy.range->text);
  std::string found;
  for (const GidEntry& gid : gids) {
    if (!gid.is_zero()) found += fmt::format("{}{}", found.empty() ? "" : ", ", describe(gid));
  }
  return fmt::format("no {}; there is {}", wanted, found);
}

GidChoice choose_automatically(const std::vector<GidEntry>& gids, bool ethernet, const GidPolicy& policy) {
  GidChoice choice;
  std::optional<int> best;
  for (const GidEntry& gid : gids) {
    const std::optional<int> rank =
        ethernet ? rank_on_ethernet(gid, policy) : (gid.is_zero() ? std::nullopt : std::optional<int>(0));
    if (!rank || (best && *best <= *rank)) continue;
    best = rank;
    choice.gid = gid;
  }
  if (!choice.gid) choice.problem = why_none(gids, ethernet, policy);
  return choice;
}

}  // namespace

bool GidEntry::is_zero() const {
  // The kernel keeps the subnet prefix in the slots of missing GIDs.
  return std::all_of(bytes.begin() + 8, bytes.end(), [](std::uint8_t byte) { return byte == 0; });
}

bool GidEntry::is_link_local() const { return bytes[0] == 0xfe && (bytes[1] & 0xc0) == 0x80; }

bool GidEntry::is_ipv4_mapped() const { return std::equal(kIpv4Prefix.begin(), kIpv4Prefix.end(), bytes.begin()); }

bool GidEntry::is_ipv4_link_local() const { return is_ipv4_mapped() && bytes[12] == 169 && bytes[13] == 254; }

std::string GidEntry::address() const {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (is_ipv4_mapped()) {
    ::inet_ntop(AF_INET, bytes.data() + kIpv4Prefix.size(), text.data(), text.size());
  } else {
    ::inet_ntop(AF_INET6, bytes.data(), text.data(), text.size());
  }
  return text.data();
}

std::optional<GidBytes> parse_gid(std::string_view text) {
  // Eight groups of exactly four digits: inet_pton alone would accept shortened forms that sysfs never writes.
  if (text.size() != 39) return std::nullopt;
  bool ipv4 = false;
  return parse_address(std::string(text), ipv4);
}

bool AddressRange::contains(const GidBytes& address) const {
  for (int bit = 0; bit < bits; ++bit) {
    const auto byte = static_cast<std::size_t>(bit / 8);
    if (((bytes[byte] ^ address[byte]) >> (7 - bit % 8) & 1) != 0) return false;
  }
  return true;
}

std::optional<AddressRange> parse_address_range(std::string_view text) {
  AddressRange range;
  const std::size_t slash = text.find('/');
  bool ipv4 = false;
  const auto bytes = parse_address(std::string(text.substr(0, slash)), ipv4);
  if (!bytes) return std::nullopt;
  range.bytes = *bytes;
  range.text = text;
  const int all = ipv4 ? 32 : 128;
  range.bits = all;
  if (slash != std::string_view::npos) {
    const auto bits = parse_number<int>(text.substr(slash + 1));
    if (!bits || *bits < 0 || *bits > all) return std::nullopt;
    range.bits = *bits;
  }
  if (ipv4) range.bits += 96;
  return range;
}

GidChoice choose_gid(const std::vector<GidEntry>& gids, bool ethernet, const GidPolicy& policy) {
  if (!policy.index) return choose_automatically(gids, ethernet, policy);
  const auto named =
      std::find_if(gids.begin(), gids.end(), [&](const GidEntry& gid) { return gid.index == *policy.index; });
  GidChoice choice;
  if (named != gids.end() && !named->is_zero()) {
    choice.gid = *named;
    if (ethernet && named->type == GidType::roce_v1) {
      choice.warning =
          fmt::format("{}={} is RoCE v1, which routers do not forward", policy.index_source, *policy.index);
    } else if (ethernet && named->is_link_local()) {
      choice.warning = fmt::format("{}={} is link-local ({}), which reaches no other network", policy.index_source,
                                   *policy.index, named->address());
    }
    return choice;
  }
  const std::string refused =
      fmt::format("{}={}: no GID is there (zero, or beyond the table)", policy.index_source, *policy.index);
  if (policy.index_is_binding) {
    choice.problem = refused;
    return choice;
  }
  choice = choose_automatically(gids, ethernet, policy);
  if (choice.gid) choice.warning = fmt::format("{}; GID {} is used instead", refused, choice.gid->index);
  return choice;
}

const char* name_of(GidType type) {
  switch (type) {
    case GidType::infiniband:
      return "InfiniBand";
    case GidType::roce_v1:
      return "RoCE v1";
    case GidType::roce_v2:
      return "RoCE v2";
    case GidType::unknown:
      break;
  }
  return "unknown type";
}

}  // namespace deep_ep::rdma
