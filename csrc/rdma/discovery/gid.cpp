#include "csrc/rdma/discovery/gid.hpp"

#include <arpa/inet.h>

#include <algorithm>

#include "csrc/rdma/discovery/nics.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep::rdma {
namespace {

constexpr std::array<std::uint8_t, 12> kIpv4Prefix = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

constexpr int kNever = 3;

// Smaller is better; kNever for a GID that must not be used unless it is asked for.
int rank(const GidEntry& gid, bool ethernet) {
  if (!ethernet) return 0;
  const GidBytes& bytes = gid.bytes;
  const bool reaches_one_cable = bytes[0] == 0xfe && (bytes[1] & 0xc0) == 0x80;  // fe80::/10
  if (reaches_one_cable || gid.type != "RoCE v2") return kNever;
  if (!gid.is_ipv4_mapped()) return 1;
  return bytes[12] == 169 && bytes[13] == 254 ? 2 : 0;
}

std::string why_none(const std::vector<GidEntry>& gids) {
  if (gids.empty()) return "all GIDs are zero";
  std::vector<std::string> found;
  for (const GidEntry& gid : gids) found.push_back(gid.text());
  return fmt::format("no RoCE v2 GID with a routable address; there is {}", fmt::join(found, ", "));
}

}  // namespace

bool GidEntry::is_zero() const {
  // The kernel keeps the subnet prefix in the slots of missing GIDs.
  return std::all_of(bytes.begin() + 8, bytes.end(), [](std::uint8_t byte) { return byte == 0; });
}

bool GidEntry::is_ipv4_mapped() const { return std::equal(kIpv4Prefix.begin(), kIpv4Prefix.end(), bytes.begin()); }

std::string GidEntry::address() const {
  std::array<char, INET6_ADDRSTRLEN> text{};
  if (is_ipv4_mapped()) {
    ::inet_ntop(AF_INET, bytes.data() + kIpv4Prefix.size(), text.data(), text.size());
  } else {
    ::inet_ntop(AF_INET6, bytes.data(), text.data(), text.size());
  }
  return text.data();
}

std::string GidEntry::text() const {
  return fmt::format("GID {} ({}, {}{}{})", index, type.empty() ? "unknown type" : type, address(),
                     netdev.empty() ? "" : ", ", netdev);
}

std::optional<GidBytes> parse_gid(std::string_view text) {
  GidBytes bytes{};
  if (::inet_pton(AF_INET6, std::string(text).c_str(), bytes.data()) != 1) return std::nullopt;
  return bytes;
}

GidChoice choose_gid(const NicPort& port, const environment::Value& index) {
  const std::vector<GidEntry>& gids = port.gids;
  std::string refused;
  if (index.text != "auto") {
    const auto named = std::ranges::find(gids, static_cast<int>(index.integer().value()), &GidEntry::index);
    if (named != gids.end()) return {.gid = *named};
    refused = fmt::format("{}={}: no GID is there (zero, or beyond the table)", index.name, index.text);
    if (environment::is_own(index.name)) return {.problem = refused};
  }
  const auto best = std::ranges::min_element(gids, {}, [&](const GidEntry& gid) { return rank(gid, port.ethernet()); });
  if (best == gids.end() || rank(*best, port.ethernet()) == kNever) return {.problem = why_none(gids)};
  if (!refused.empty()) refused += fmt::format("; GID {} is used instead", best->index);
  return {.gid = *best, .problem = refused};
}

}  // namespace deep_ep::rdma
