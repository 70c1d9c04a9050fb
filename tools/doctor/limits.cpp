// `deep_ep doctor`: what the system lets a process have, against what a run needs: locked memory, open files, /dev/shm,
// control groups, huge pages.
#include <fmt/format.h>
#include <sys/statvfs.h>

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "tools/doctor/cgroup.hpp"
#include "tools/doctor/checks.hpp"
#include "tools/doctor/needs.hpp"

namespace deep_ep::tools {
namespace {

constexpr std::int64_t kUnlimited = -1;

struct Limit {
  std::int64_t soft = kUnlimited;
  std::int64_t hard = kUnlimited;  ///< as far as the process may raise it by itself

  bool at_least(std::uint64_t needed) const { return soft == kUnlimited || soft >= static_cast<std::int64_t>(needed); }
  bool can_be_raised_to(std::uint64_t needed) const {
    return hard == kUnlimited || hard >= static_cast<std::int64_t>(needed);
  }
};

std::optional<std::int64_t> limit_of(std::string_view word) {
  return word == "unlimited" ? kUnlimited : parse_number<std::int64_t>(word);
}

// Of /proc/self/limits; nothing where the file does not say.
std::optional<Limit> read_limit(const Patient& patient, std::string_view name) {
  std::istringstream limits(patient.root.read("/proc/self/limits").value_or(""));
  for (std::string line; std::getline(limits, line);) {
    if (!line.starts_with(name)) continue;
    std::istringstream words(line.substr(name.size()));
    std::string soft;
    std::string hard;
    words >> soft >> hard;
    const auto now = limit_of(soft);
    if (now) return Limit{*now, limit_of(hard).value_or(*now)};
  }
  return std::nullopt;
}

void check_locked_memory(const Patient& patient, const Needs& needs, Findings& findings) {
  const auto limit = read_limit(patient, "Max locked memory");
  if (!limit || patient.nics.empty()) return;
  const auto privileges = read_privileges(patient.root);
  const bool may_lock_anyway = privileges && privileges->ipc_lock;
  if (limit->soft == kUnlimited || may_lock_anyway) {
    findings.push_back({"locked_memory", Verdict::ok,
                        limit->soft == kUnlimited ? "locked memory is not limited"
                                                  : "locked memory is limited, but CAP_IPC_LOCK lifts the limit",
                        "", ""});
    return;
  }
  // NCCL and others register some tens of MiB of host memory of their own in the same process.
  constexpr std::uint64_t kOfOthers = std::uint64_t{64} << 20;
  const bool enough = limit->at_least(needs.locked_bytes + kOfOthers);
  findings.push_back({"locked_memory",
                      !limit->at_least(needs.locked_bytes) ? Verdict::error
                      : enough                             ? Verdict::ok
                                                           : Verdict::warning,
                      fmt::format("locked memory is limited to {}; a rank registers {} ({})",
                                  format_bytes(static_cast<std::uint64_t>(limit->soft)),
                                  format_bytes(needs.locked_bytes), needs.text()),
                      enough ? "" : "registrations of host memory beyond it fail with ENOMEM",
                      enough ? ""
                             : "ulimit -l unlimited; in a container, the capability IPC_LOCK or the runtime's memlock "
                               "limit"});
}

void check_open_files(const Patient& patient, const Needs& needs, Findings& findings) {
  const auto limit = read_limit(patient, "Max open files");
  if (!limit) return;
  const bool enough = limit->at_least(needs.open_files);
  findings.push_back({"open_files",
                      enough                                      ? Verdict::ok
                      : limit->can_be_raised_to(needs.open_files) ? Verdict::warning
                                                                  : Verdict::error,
                      limit->soft == kUnlimited
                          ? "open files are not limited"
                          : fmt::format("a process may have {} open files, rank 0 needs about {} ({})", limit->soft,
                                        needs.open_files, needs.text()),
                      enough ? "" : "sockets and the memory of peers cannot be opened: \"Too many open files\"",
                      enough ? "" : "ulimit -n 1048576; in a container, the runtime's nofile limit"});
}

// The size of a tmpfs in its mount options ("size=65536k"); nothing: half of the memory, or not a mount of its own.
std::optional<std::uint64_t> tmpfs_size(std::string_view options) {
  for (const std::string_view option : split(options, ',')) {
    if (!option.starts_with("size=")) continue;
    const std::string_view text = option.substr(5);
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc()) return std::nullopt;
    const char unit = end == text.data() + text.size() ? 'b' : *end;
    const int shift = unit == 'k' ? 10 : unit == 'm' ? 20 : unit == 'g' ? 30 : 0;
    return value << shift;
  }
  return std::nullopt;
}

// Of the mount itself, which is what counts: free is what nobody has taken.
struct SharedMemory {
  std::optional<std::uint64_t> size;
  std::optional<std::uint64_t> free;
};
std::optional<SharedMemory> shared_memory(const Patient& patient) {
  if (patient.root.is_this_machine()) {
    struct ::statvfs mount {};
    if (::statvfs("/dev/shm", &mount) != 0) return std::nullopt;
    return SharedMemory{mount.f_blocks * mount.f_frsize, mount.f_bavail * mount.f_frsize};
  }
  std::istringstream mounts(patient.root.read("/proc/mounts").value_or(""));
  std::optional<std::string> options;  // of the last one, which is on top
  for (std::string line; std::getline(mounts, line);) {
    const std::vector<std::string_view> fields = split(line, ' ');
    if (fields.size() > 3 && fields[1] == "/dev/shm") options = std::string(fields[3]);
  }
  if (!options) return std::nullopt;
  return SharedMemory{tmpfs_size(*options), std::nullopt};
}

void check_shared_memory(const Patient& patient, const Needs& needs, Findings& findings) {
  // What NCCL and the workers of PyTorch are known to want; this library's ranks on GPUs need next to nothing of it.
  constexpr std::uint64_t kOfOthers = std::uint64_t{1} << 30;
  const auto memory = shared_memory(patient);
  if (!memory) return;
  const std::uint64_t needed = std::max(kOfOthers, needs.shared_bytes);
  const auto have = memory->free ? memory->free : memory->size;
  const std::string text = !memory->size  ? "/dev/shm is half of the memory"
                           : memory->free ? fmt::format("/dev/shm has {}, of which {} are free",
                                                        format_bytes(*memory->size), format_bytes(*memory->free))
                                          : fmt::format("/dev/shm has {}", format_bytes(*memory->size));
  if (have && *have < needed) {
    findings.push_back(
        {"shared_memory", Verdict::warning,
         needs.shared_bytes > kOfOthers
             ? fmt::format("{}; ranks on the CPU need {} ({})", text, format_bytes(needs.shared_bytes), needs.text())
             : text,
         "what shares memory between processes there ends with SIGBUS or ENOSPC: NCCL, PyTorch's "
         "workers, and ranks of this library that run on the CPU",
         "docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir of medium Memory at /dev/shm"});
    return;
  }
  findings.push_back({"shared_memory", Verdict::ok, text, "", ""});
}

// What containers and batch systems set beside the limits of processes.
void check_control_groups(const Patient& patient, const Needs& needs, Findings& findings) {
  const CgroupLimits limits = read_cgroup(patient.root);
  std::string text;
  const auto add = [&](const std::string& what) { text += (text.empty() ? "" : ", ") + what; };
  if (limits.memory) add(format_bytes(*limits.memory));
  if (limits.cpus) add(fmt::format("{:.3g} CPUs", *limits.cpus));
  if (limits.processes) add(fmt::format("{} threads", *limits.processes));
  if (text.empty()) return;
  const std::size_t before = findings.size();
  const auto ranks = static_cast<double>(needs.run.ranks_per_node);
  if (limits.memory && *limits.memory < needs.host_bytes) {
    // Without a GPU the ranks' sizes are a guess: it may be a small machine that runs something small.
    findings.push_back({"control_group", patient.gpus.empty() ? Verdict::note : Verdict::error,
                        fmt::format("the control group may use {} of memory, the ranks of a node need {} ({})",
                                    format_bytes(*limits.memory), format_bytes(needs.host_bytes), needs.text()),
                        "the kernel ends a rank (OOMKilled, exit status 137)",
                        "a higher memory limit of the container (resources.limits.memory counts /dev/shm, too), or "
                        "fewer tokens"});
  }
  if (limits.cpus && *limits.cpus < ranks) {
    findings.push_back(
        {"control_group", Verdict::warning,
         fmt::format("the control group has {:.3g} CPUs for {} ranks", *limits.cpus, needs.run.ranks_per_node),
         "the kernel stops threads that have used their share: ranks come late, all wait for them",
         "no CPU limit, or at least two CPUs for each rank (resources.limits.cpu)"});
  }
  if (limits.processes && *limits.processes < needs.threads) {
    findings.push_back({"control_group", Verdict::warning,
                        fmt::format("the control group may have {} threads, {} ranks have about {}", *limits.processes,
                                    needs.run.ranks_per_node, needs.threads),
                        "threads cannot be started: \"Resource temporarily unavailable\"",
                        "a higher limit of processes: podPidsLimit of the kubelet, --pids-limit of docker"});
  }
  if (findings.size() == before) {
    findings.push_back({"control_group", Verdict::ok, fmt::format("the control group has {}", text), "", ""});
  }
}

void check_huge_pages(const Patient& patient, Findings& findings) {
  const std::string text = patient.root.read("/sys/kernel/mm/transparent_hugepage/enabled").value_or("");
  const std::size_t open = text.find('[');
  const std::size_t close = text.find(']');
  if (open == std::string::npos || close == std::string::npos || close < open) return;
  const std::string mode = text.substr(open + 1, close - open - 1);
  findings.push_back({"huge_pages", mode == "never" ? Verdict::note : Verdict::ok,
                      fmt::format("transparent huge pages: {}", mode),
                      mode == "never" ? "registering host memory takes longer; GPU memory is not concerned" : "", ""});
}

}  // namespace

void check_limits(const Patient& patient, Findings& findings) {
  const Needs needs = needs_of(patient);
  check_locked_memory(patient, needs, findings);
  check_open_files(patient, needs, findings);
  check_shared_memory(patient, needs, findings);
  check_control_groups(patient, needs, findings);
  check_huge_pages(patient, findings);
}

}  // namespace deep_ep::tools
