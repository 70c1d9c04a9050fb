#include "csrc/support/host_memory.hpp"

#include <algorithm>
#include <cstdint>
#include <fstream>

namespace deep_ep {
namespace {

constexpr std::size_t kUnknown = SIZE_MAX;

/// The number behind `name` in a file of lines "name number", or its first number where `name` is empty.
std::size_t number_in(const std::string& path, const std::string& name = "") {
  std::ifstream file(path);
  std::string word;
  std::size_t number = 0;
  if (name.empty()) return file >> number ? number : kUnknown;
  while (file >> word) {
    if (word == name && file >> number) return number;
  }
  return kUnknown;
}

}  // namespace

std::size_t available_host_memory(const std::string& root) {
  const std::size_t kib = number_in(root + "/proc/meminfo", "MemAvailable:");
  std::size_t available = kib == kUnknown ? kUnknown : kib * 1024;
  std::string group;
  for (std::ifstream groups(root + "/proc/self/cgroup"); std::getline(groups, group);) {
    if (group.starts_with("0::")) break;
    group.clear();
  }
  if (group.empty()) return available;
  // Each group is also limited by its ancestors.
  for (group = group.substr(3);; group.resize(group.rfind('/'))) {
    const std::string at = root + "/sys/fs/cgroup" + group;
    const std::size_t most = number_in(at + "/memory.max"), used = number_in(at + "/memory.current");
    if (most != kUnknown && used != kUnknown) {
      const std::size_t cached = number_in(at + "/memory.stat", "inactive_file");  // the system takes it back
      const std::size_t held = used - std::min(used, cached == kUnknown ? 0 : cached);
      available = std::min(available, most - std::min(most, held));
    }
    if (group.empty() || group.rfind('/') == group.npos) return available;
  }
}

}  // namespace deep_ep
