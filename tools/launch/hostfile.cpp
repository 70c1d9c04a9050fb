#include "tools/launch/hostfile.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <numeric>
#include <optional>
#include <sstream>
#include <utility>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"
#include "kernels/common/limits.hpp"

namespace deep_ep::tools {
namespace {

/// The words of the next line that has any; none at the end.
std::vector<std::string> next_words(std::ifstream& in, std::string& line) {
  while (std::getline(in, line)) {
    std::istringstream words(line.substr(0, line.find('#')));
    std::vector<std::string> result{std::istream_iterator<std::string>(words), {}};
    if (!result.empty()) return result;
  }
  return {};
}

Host read_host(const std::vector<std::string>& words) {
  Host host{.name = words.front()};
  bool well = !host.name.starts_with('-');  // ssh would take it for an option
  for (std::size_t i = 1; i < words.size(); ++i) {
    const std::string_view word = words[i];
    const std::string_view value = word.substr(word.find('=') + 1);
    if (word.starts_with("slots=")) {
      host.ranks = parse_number<int>(value).value_or(0);
      well = well && host.ranks >= 1 && host.ranks <= kMaxRanks;
    } else if (word.starts_with("topology=") && !value.empty()) {
      host.topology = value;
    } else {
      well = false;
    }
  }
  return well ? host : Host{};
}

/// "2:5", "2:", ":5" or "2": numbers from 1.
std::pair<std::size_t, std::size_t> read_range(const std::string& range, std::size_t hosts) {
  if (range.empty()) return {1, hosts};
  const std::string_view text = range;
  const std::size_t colon = text.find(':');
  const std::string_view first = text.substr(0, colon);
  const std::string_view last = colon == std::string_view::npos ? first : text.substr(colon + 1);
  const auto from = first.empty() ? std::optional<std::size_t>(1) : parse_number<std::size_t>(first);
  const auto to = last.empty() ? std::optional(hosts) : parse_number<std::size_t>(last);
  if (!from || !to || *from < 1 || *from > *to || *to > hosts) {
    throw InvalidArgument(fmt::format("--range {}, allowed: FROM:TO, numbers of the {} hosts from 1 on", range, hosts));
  }
  return {*from, *to};
}

std::vector<std::string> parts_of(const std::string& label) {
  std::vector<std::string> parts;
  for (const std::string_view part : split(label, '/')) {
    if (!part.empty()) parts.emplace_back(part);  // a label may begin with '/'
  }
  return parts;
}

}  // namespace

std::vector<Host> read_hosts(const std::string& file, const std::string& range) {
  std::ifstream in(file);
  if (!in) throw InvalidArgument(fmt::format("--hostfile {}: cannot read it", file));
  std::vector<Host> hosts;
  std::string line;
  for (auto words = next_words(in, line); !words.empty(); words = next_words(in, line)) {
    hosts.push_back(read_host(words));
    if (hosts.back().name.empty()) {
      throw InvalidArgument(
          fmt::format("--hostfile {}: '{}', allowed: HOST, HOST slots=N (1 to {}), HOST topology=BLOCK/SUBBLOCK/HOST",
                      file, line, kMaxRanks));
    }
  }
  if (hosts.empty()) throw InvalidArgument(fmt::format("--hostfile {}: there is no host in it", file));
  const auto [from, to] = read_range(range, hosts.size());
  return {hosts.begin() + static_cast<std::ptrdiff_t>(from) - 1, hosts.begin() + static_cast<std::ptrdiff_t>(to)};
}

void read_topology(const std::string& file, std::vector<Host>& hosts) {
  std::ifstream in(file);
  if (!in) throw InvalidArgument(fmt::format("--order-by {}: cannot read it", file));
  std::map<std::string, std::string> labels;
  std::string line;
  for (auto words = next_words(in, line); !words.empty(); words = next_words(in, line)) {
    if (words.size() != 2) throw InvalidArgument(fmt::format("--order-by {}: '{}', allowed: HOST LABEL", file, line));
    labels[words[0]] = words[1];
  }
  for (Host& host : hosts) {
    const auto found = labels.find(host.name);
    if (found == labels.end()) {
      throw InvalidArgument(fmt::format("--order-by {}: there is no line for {}", file, host.name));
    }
    host.topology = found->second;
  }
}

std::vector<int> near_order(std::span<const std::string> labels, std::span<const std::string> names) {
  std::vector<int> order(labels.size());
  std::iota(order.begin(), order.end(), 0);
  const auto missing = std::ranges::count(labels, std::string());
  if (missing == std::ssize(labels)) return order;
  if (missing != 0) {
    const auto which = std::ranges::find(labels, std::string()) - labels.begin();
    fail<InvalidArgument>("{} has no topology label, but others have one", names[static_cast<std::size_t>(which)]);
  }
  const std::vector<std::string> first = parts_of(labels.front());
  // What is compared, for each node: at each level whether it has left the first node's branch, and the part.
  std::vector<std::vector<std::pair<bool, std::string>>> keys;
  for (const std::string& label : labels) {
    auto& key = keys.emplace_back();
    bool left = false;
    for (const std::string& part : parts_of(label)) {
      left = left || key.size() >= first.size() || part != first[key.size()];
      key.emplace_back(left, part);
    }
  }
  std::ranges::stable_sort(
      order.begin() + 1, order.end(), {}, [&](int node) -> auto& { return keys[static_cast<std::size_t>(node)]; });
  return order;
}

}  // namespace deep_ep::tools
