#include "tools/doctor/ethtool.hpp"

#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <cstring>
#include <memory>
#include <new>
#include <sstream>
#include <vector>

#include "csrc/support/text.hpp"
#include "csrc/support/unique_fd.hpp"

namespace deep_ep::tools {
namespace {

using Counters = std::map<std::string, std::uint64_t>;

constexpr std::size_t kMostCounters = 65536;

/// An answer of the driver: a header of type T, and whatever follows it.
template <class T>
class Request {
 public:
  Request(std::uint32_t command, std::size_t bytes_behind) : words_((sizeof(T) + bytes_behind + 7) / 8) {
    header().cmd = command;
  }
  T& header() { return *reinterpret_cast<T*>(words_.data()); }
  const char* behind() const { return reinterpret_cast<const char*>(words_.data()) + sizeof(T); }
  bool ask(int socket, const std::string& interface) {
    ::ifreq request{};
    if (interface.size() >= sizeof request.ifr_name) return false;
    std::memcpy(request.ifr_name, interface.data(), interface.size());
    request.ifr_data = reinterpret_cast<char*>(words_.data());
    return ::ioctl(socket, SIOCETHTOOL, &request) == 0;
  }

 private:
  std::vector<std::uint64_t> words_;
};

Counters ask_driver(const std::string& interface) {
  const UniqueFd socket(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  if (!socket) return {};
  Request<::ethtool_drvinfo> driver(ETHTOOL_GDRVINFO, 0);
  if (!driver.ask(socket.get(), interface)) return {};
  const std::size_t count = driver.header().n_stats;
  if (count == 0 || count > kMostCounters) return {};
  // Room for more: their number may change between the questions.
  Request<::ethtool_gstrings> names(ETHTOOL_GSTRINGS, 2 * count * ETH_GSTRING_LEN);
  names.header().string_set = ETH_SS_STATS;
  names.header().len = static_cast<std::uint32_t>(count);
  Request<::ethtool_stats> values(ETHTOOL_GSTATS, 2 * count * sizeof(std::uint64_t));
  values.header().n_stats = static_cast<std::uint32_t>(count);
  if (!names.ask(socket.get(), interface) || !values.ask(socket.get(), interface)) return {};
  if (names.header().len != count || values.header().n_stats != count) return {};
  Counters counters;
  for (std::size_t i = 0; i < count; ++i) {
    const char* name = names.behind() + i * ETH_GSTRING_LEN;
    std::uint64_t value = 0;
    std::memcpy(&value, values.behind() + i * sizeof value, sizeof value);
    counters[std::string(name, ::strnlen(name, ETH_GSTRING_LEN))] = value;
  }
  return counters;
}

/// "rx_prio3_pause" is `head`, one digit, `tail`.
bool is_of_priority(std::string_view name, std::string_view head, std::string_view tail) {
  return name.size() == head.size() + 1 + tail.size() && name.starts_with(head) && name.ends_with(tail) &&
         name[head.size()] >= '0' && name[head.size()] <= '7';
}

void add(Counters& sums, const char* name, std::uint64_t value) { sums[name] += value; }

}  // namespace

std::map<std::string, std::uint64_t> read_ethtool(const topology::SystemRoot& root, const std::string& interface) {
  if (root.is_this_machine()) return ask_driver(interface);
  Counters counters;
  std::istringstream lines(root.read("/ethtool/" + interface).value_or(""));
  for (std::string line; std::getline(lines, line);) {
    const std::size_t colon = line.rfind(':');
    if (colon == std::string::npos) continue;
    const auto value = parse_number<std::uint64_t>(trim(std::string_view(line).substr(colon + 1)));
    if (value) counters[std::string(trim(std::string_view(line).substr(0, colon)))] = *value;
  }
  return counters;
}

std::map<std::string, std::uint64_t> pauses_of(const std::map<std::string, std::uint64_t>& counters) {
  Counters sums;
  Counters whole_port;  // pauses of all priorities at once, which drivers count beside those of single ones
  for (const auto& [name, value] : counters) {
    // ConnectX, then Broadcom.
    if (is_of_priority(name, "rx_prio", "_pause") || is_of_priority(name, "rx_pfc_ena_frames_pri", "")) {
      add(sums, "pauses_received", value);
    } else if (is_of_priority(name, "tx_prio", "_pause") || is_of_priority(name, "tx_pfc_ena_frames_pri", "")) {
      add(sums, "pauses_sent", value);
    } else if (is_of_priority(name, "rx_prio", "_pause_duration")) {
      add(sums, "paused_us", value);
    } else if (name == "tx_pause_storm_error_events") {
      add(sums, "pause_storms", value);
    } else if (name == "rx_discards_phy" || is_of_priority(name, "rx_prio", "_buf_discard")) {
      sums["dropped_on_arrival"] = std::max(sums["dropped_on_arrival"], value);  // the first counts the others
    } else if (name == "rx_pause_ctrl_phy" || name == "rx_pause_frames") {
      add(whole_port, "pauses_received", value);
    } else if (name == "tx_pause_ctrl_phy" || name == "tx_pause_frames") {
      add(whole_port, "pauses_sent", value);
    }
  }
  for (const auto& [name, value] : whole_port) sums[name] = std::max(sums[name], value);
  return sums;
}

}  // namespace deep_ep::tools
