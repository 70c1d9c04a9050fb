#include "csrc/rdma/discovery/gid.hpp"

#include <arpa/inet.h>

#include <algorithm>

#include "csrc/support/format.hpp"

namespace deep_ep::rdma {
namespace {

constexpr std::array<std::uint8_t, 12> kIpv4Prefix = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

std::string describe(const GidEntry& gid) {
  return fmt::format("GID {} ({}, {})", gid.index, name_of(gid.type), gid.address());
}

constexpr int kNever = 3;

// Smaller is better; kNever for a GID that must not be used unless it is asked for.
int rank(const GidEntry& gid, bool ethernet) {
  if (gid.is_zero()) return kNever;
  if (!ethernet) return 0;
  if (gid.is_link_local() || gid.type != GidType::roce_v2) return kNever;
  if (gid.is_ipv4_link_local()) return 2;
  return gid.is_ipv4_mapped() ? 0 : 1;
}

std::string why_none(const std::vector<GidEntry>& gids, bool ethernet) {
  if (std::all_of(gids.begin(), gids.end(), [](const GidEntry& gid) { return gid.is_zero(); })) {
    return "all GIDs are zero";
  }
  if (!ethernet) return "no usable GID";
  std::string found;
  for (const GidEntry& gid : gids) {
    if (!gid.is_zero()) found += fmt::format("{}{}", found.empty() ? "" : ", ", describe(gid));
  }
  return fmt::format("no RoCE v2 GID with a routable address; there is {}", found);
}

GidChoice choose_automatically(const std::vector<GidEntry>& gids, bool ethernet) {
  const auto best = std::ranges::min_element(gids, {}, [&](const GidEntry& gid) { return rank(gid, ethernet); });
  if (best == gids.end() || rank(*best, ethernet) == kNever) return {.problem = why_none(gids, ethernet)};
  return {.gid = *best};
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
  GidBytes bytes{};
  if (::inet_pton(AF_INET6, std::string(text).c_str(), bytes.data()) != 1) return std::nullopt;
  return bytes;
}

GidChoice choose_gid(const std::vector<GidEntry>& gids, bool ethernet, const GidPolicy& policy) {
  if (!policy.index) return choose_automatically(gids, ethernet);
  const auto named = std::ranges::find(gids, *policy.index, &GidEntry::index);
  if (named != gids.end() && !named->is_zero()) return {.gid = *named};
  const std::string refused =
      fmt::format("{}={}: no GID is there (zero, or beyond the table)", policy.index_source, *policy.index);
  if (policy.index_is_binding) return {.problem = refused};
  GidChoice choice = choose_automatically(gids, ethernet);
  if (choice.gid) choice.warning = fmt::format("{}; GID {} is used instead", refused, choice.gid->index);
  return choice;
}

const char* name_of(GidType type) {
  constexpr std::array kNames = {"InfiniBand", "RoCE v1", "RoCE v2", "unknown type"};
  return kNames[static_cast<std::size_t>(type)];
}

}  // namespace deep_ep::rdma
