#include "csrc/support/device_list.hpp"

#include <algorithm>
#include <array>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"

namespace deep_ep {

std::vector<ListedDevice> parse_devices(std::string_view text, ListOf what) {
  constexpr std::array kGrammars = {"[^][=]<name>,...", "[^][=]<name>[:<port>],...",
                                    "<CUDA id or GPU UUID>:<hca>[:<port>],..."};
  constexpr int kMostPorts = 254;  // as InfiniBand numbers them
  std::vector<ListedDevice> devices;
  for (const std::string_view entry : split(text, ',')) {
    const auto require = [&](bool holds, const std::string& otherwise) {
      if (holds) return;
      fail<InvalidArgument>("entry {}, '{}': {}; allowed: {}", devices.size() + 1, entry, otherwise,
                            kGrammars[static_cast<std::size_t>(what)]);
    };
    require(!entry.empty(), "it is empty");
    ListedDevice device{.text = std::string(entry)};
    std::vector<std::string_view> parts = what == ListOf::names ? std::vector{entry} : split(entry, ':');
    const std::size_t least = what == ListOf::gpus ? 2 : 1;
    require(parts.size() == least || parts.size() == least + 1,
            fmt::format("it has {} parts with ':' between them, allowed: {} to {}", parts.size(), least, least + 1));
    if (what == ListOf::gpus) {
      device.gpu = parts[0];
      require(device.gpu.starts_with("GPU-") || parse_number<int>(device.gpu).value_or(-1) >= 0,
              fmt::format("'{}' is neither a CUDA id nor a GPU UUID (GPU-...)", device.gpu));
      parts.erase(parts.begin());
    }
    device.name = parts[0];
    require(!device.name.empty() && device.name.find_first_of("/=^ \t\r\n\f\v") == std::string::npos,
            fmt::format("'{}' is not the name of a device", device.name));
    if (parts.size() == 2) {
      device.port = parse_number<int>(parts[1]).value_or(0);
      require(*device.port >= 1 && *device.port <= kMostPorts,
              fmt::format("the port is '{}', not a number from 1 to {}", parts[1], kMostPorts));
    }
    devices.push_back(std::move(device));
  }
  return devices;
}

DeviceFilter::DeviceFilter(const environment::Value& value, bool prefixes, ListOf what) : prefixes_(prefixes) {
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
  devices_ = parse_devices(text, what);
}

bool DeviceFilter::allows(std::string_view name, int port) const {
  const auto listed = [&](const ListedDevice& device) {
    return names(device, name) && device.port.value_or(port) == port;
  };
  return !is_set() || std::ranges::any_of(devices_, listed) != excludes_;
}

std::vector<std::string> DeviceFilter::without_match(std::span<const std::string> names) const {
  std::vector<std::string> found;
  for (const ListedDevice& device : devices_) {
    const auto has_it = [&](const std::string& name) { return this->names(device, name); };
    if (std::ranges::none_of(names, has_it)) found.push_back(device.name);
  }
  return found;
}

}  // namespace deep_ep
