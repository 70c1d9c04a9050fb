#include "tools/doctor/cgroup.hpp"

#include <algorithm>
#include <sstream>
#include <vector>

#include "csrc/support/text.hpp"

namespace deep_ep::tools {
namespace {

using topology::SystemRoot;

constexpr const char* kRoot = "/sys/fs/cgroup";

template <class T>
void tighten(std::optional<T>& limit, std::optional<T> other) {
  if (other && (!limit || *other < *limit)) limit = other;
}

// "max" is no limit; nor are the numbers near 2^63 that version 1 has in its place.
std::optional<std::uint64_t> cgroup_limit_of(std::string_view text) {
  const auto value = parse_number<std::uint64_t>(trim(text));
  return value && *value < (std::uint64_t{1} << 60) ? value : std::nullopt;
}
std::optional<std::uint64_t> read_cgroup_limit(const SystemRoot& root, const std::string& file) {
  return cgroup_limit_of(root.read(file).value_or(""));
}

std::optional<double> cpu_share(std::string_view quota, std::string_view period) {
  const auto time = parse_number<double>(quota);
  const auto of = parse_number<double>(period);
  return time && of && *time > 0 && *of > 0 ? std::optional(*time / *of) : std::nullopt;
}

/// The group at `path` and all above it, as far as they are to be seen from here: in a container often the top alone.
std::vector<std::string> groups_above(const std::string& mount, std::string path) {
  std::vector<std::string> folders;
  for (int depth = 0; depth < 64 && path.size() > 1; ++depth) {
    folders.push_back(mount + path);
    path = path.substr(0, path.rfind('/'));
  }
  folders.push_back(mount);
  return folders;
}

// "mlx5_0 hca_handle=2 hca_object=max"
void read_rdma(const SystemRoot& root, const std::string& file, CgroupLimits& limits) {
  std::istringstream lines(root.read(file).value_or(""));
  for (std::string line; std::getline(lines, line);) {
    const std::vector<std::string_view> words = split(line, ' ');
    CgroupLimits::Rdma& nic = limits.nics[std::string(words[0])];
    for (const std::string_view word : words) {
      if (word.starts_with("hca_handle=")) tighten(nic.handles, cgroup_limit_of(word.substr(11)));
      if (word.starts_with("hca_object=")) tighten(nic.objects, cgroup_limit_of(word.substr(11)));
    }
  }
}

void read_group(const SystemRoot& root, const std::string& folder, CgroupLimits& limits) {
  tighten(limits.memory, read_cgroup_limit(root, folder + "/memory.max"));
  tighten(limits.memory, read_cgroup_limit(root, folder + "/memory.limit_in_bytes"));
  tighten(limits.processes, read_cgroup_limit(root, folder + "/pids.max"));
  const std::string text = root.read(folder + "/cpu.max").value_or("");
  if (const auto words = split(text, ' '); words.size() == 2) tighten(limits.cpus, cpu_share(words[0], words[1]));
  tighten(limits.cpus, cpu_share(root.read(folder + "/cpu.cfs_quota_us").value_or(""),
                                 root.read(folder + "/cpu.cfs_period_us").value_or("")));
  read_rdma(root, folder + "/rdma.max", limits);
}

}  // namespace

CgroupLimits read_cgroup(const SystemRoot& root) {
  CgroupLimits limits;
  // "0::/path" of version 2, "4:memory:/path" or "1:cpu,cpuacct:/path" of version 1.
  std::istringstream lines(root.read("/proc/self/cgroup").value_or(""));
  for (std::string line; std::getline(lines, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string path = line.substr(second + 1);
    const std::string controllers = line.substr(first + 1, second - first - 1);
    for (const std::string_view controller : split(controllers, ',')) {
      const std::string mount = controller.empty() ? kRoot : std::string(kRoot) + "/" + std::string(controller);
      for (const std::string& folder : groups_above(mount, path)) read_group(root, folder, limits);
    }
  }
  return limits;
}

}  // namespace deep_ep::tools
