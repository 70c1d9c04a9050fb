#include "csrc/support/device_list.hpp"

#include <algorithm>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep {

void ListEntry::refuse(const std::string& reason) const {
  fail<InvalidArgument>("entry {}, '{}': {}; allowed: {}", number, text, reason, grammar);
}

std::vector<std::string_view> ListEntry::parts(std::size_t least, std::size_t most) const {
  std::vector<std::string_view> parts = split(text, ':');
  if (parts.size() < least || parts.size() > most) {
    refuse(fmt::format("it has {} parts with ':' between them, allowed: {} to {}", parts.size(), least, most));
  }
  return parts;
}

std::string ListEntry::device(std::string_view part) const {
  if (part.empty() || part.find_first_of("/=^") != part.npos || part.find_first_of(kWhiteSpace) != part.npos) {
    refuse(fmt::format("'{}' is not the name of a device", part));
  }
  return std::string(part);
}

int ListEntry::port(std::string_view part) const {
  constexpr int kMostPorts = 254;  // as InfiniBand numbers them
  const auto port = parse_number<int>(part);
  if (!port || *port < 1 || *port > kMostPorts) {
    refuse(fmt::format("the port is '{}', not a number from 1 to {}", part, kMostPorts));
  }
  return *port;
}

std::vector<ListEntry> list_entries(std::string_view text, std::string_view grammar) {
  std::vector<ListEntry> entries;
  for (const std::string_view entry : split(text, ',')) {
    entries.push_back({grammar, entries.size() + 1, entry});
    if (entry.empty()) entries.back().refuse("it is empty");
  }
  return entries;
}

DeviceFilter::DeviceFilter(const environment::Value& value, bool prefixes, bool ports) : prefixes_(prefixes) {
  std::string_view text = trim(value.text);
  if (text.empty()) return;
  setting_ = fmt::format("{}={}", value.name, text);
  if (text.starts_with('^')) {
    excludes_ = true;
    text.remove_prefix(1);
  }
  if (text.starts_with('=')) {
    prefixes_ = false;
    text.remove_prefix(1);
  }
  for (const ListEntry& entry : list_entries(text, ports ? "[^][=]<name>[:<port>],..." : "[^][=]<name>,...")) {
    const std::vector<std::string_view> parts = ports ? entry.parts(1, 2) : std::vector{entry.text};
    items_.push_back({entry.device(parts[0]), std::nullopt});
    if (parts.size() == 2) items_.back().port = entry.port(parts[1]);
  }
}

bool DeviceFilter::allows(std::string_view name, int port) const {
  const auto listed = [&](const Item& item) { return names(item, name) && item.port.value_or(port) == port; };
  return !is_set() || std::ranges::any_of(items_, listed) != excludes_;
}

std::vector<std::string> DeviceFilter::without_match(std::span<const std::string> names) const {
  std::vector<std::string> found;
  for (const Item& item : items_) {
    const auto has_it = [&](const std::string& name) { return this->names(item, name); };
    if (std::ranges::none_of(names, has_it)) found.push_back(item.name);
  }
  return found;
}

}  // namespace deep_ep
