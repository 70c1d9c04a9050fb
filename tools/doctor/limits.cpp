// `deep_ep doctor`: what the system lets a process have: locked memory, open files, /dev/shm, huge pages.
#include <fmt/format.h>

#include <charconv>
#include <cstdint>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {
namespace {

constexpr std::int64_t kUnlimited = -1;

// A soft limit of /proc/self/limits; nothing where the file does not say.
std::optional<std::int64_t> soft_limit(const Patient& patient, std::string_view name) {
  std::istringstream limits(patient.root.read("/proc/self/limits").value_or(""));
  for (std::string line; std::getline(limits, line);) {
    if (!line.starts_with(name)) continue;
    const std::string_view rest = trim(std::string_view(line).substr(name.size()));
    if (rest.starts_with("unlimited")) return kUnlimited;
    std::int64_t value = 0;
    if (std::from_chars(rest.data(), rest.data() + rest.size(), value).ec == std::errc()) return value;
  }
  return std::nullopt;
}

void check_locked_memory(const Patient& patient, Findings& findings) {
  const auto limit = soft_limit(patient, "Max locked memory");
  if (!limit || patient.nics.empty()) return;
  const auto privileges = read_privileges(patient.root);
  const bool may_lock_anyway = privileges && privileges->ipc_lock;
  if (*limit == kUnlimited || may_lock_anyway) {
    findings.push_back({"locked_memory", Verdict::ok,
                        *limit == kUnlimited ? "locked memory is not limited"
                                             : "locked memory is limited, but CAP_IPC_LOCK lifts the limit",
                        "", ""});
    return;
  }
  // Rings and staging areas of 64 peers; heaps are far larger where ranks run on the CPU.
  constexpr std::int64_t kEnough = std::int64_t{1} << 30;
  const std::string size = format_bytes(static_cast<std::uint64_t>(*limit));
  findings.push_back({"locked_memory", *limit < kEnough ? Verdict::error : Verdict::warning,
                      fmt::format("locked memory is limited to {}", size),
                      "registrations of host memory beyond it fail with ENOMEM",
                      "ulimit -l unlimited; in a container, the capability IPC_LOCK or the runtime's memlock limit"});
}

void check_open_files(const Patient& patient, Findings& findings) {
  // A rank opens a file descriptor for each part of each peer's memory, and some for NICs and GPUs.
  constexpr std::int64_t kEnough = 4096;
  const auto limit = soft_limit(patient, "Max open files");
  if (!limit) return;
  const bool enough = *limit == kUnlimited || *limit >= kEnough;
  findings.push_back(
      {"open_files", enough ? Verdict::ok : Verdict::warning,
       *limit == kUnlimited ? "open files are not limited" : fmt::format("a process may have {} open files", *limit),
       enough ? "" : "with many peers, sockets and mapped memory it may run out of them",
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

void check_shared_memory(const Patient& patient, Findings& findings) {
  // Bootstraps and small segments fit; heaps of ranks on the CPU, NCCL and the workers of PyTorch do not.
  constexpr std::uint64_t kEnough = std::uint64_t{1} << 30;
  std::istringstream mounts(patient.root.read("/proc/mounts").value_or(""));
  std::optional<std::string> options;  // of the last one, which is on top
  for (std::string line; std::getline(mounts, line);) {
    const std::vector<std::string_view> fields = split(line, ' ');
    if (fields.size() > 3 && fields[1] == "/dev/shm") options = std::string(fields[3]);
  }
  if (!options) return;
  const auto size = tmpfs_size(*options);
  if (size && *size < kEnough) {
    findings.push_back(
        {"shared_memory", Verdict::warning, fmt::format("/dev/shm has {}", format_bytes(*size)),
         "what shares memory between processes there ends with SIGBUS or ENOSPC: NCCL, PyTorch's "
         "workers, and ranks of this library that run on the CPU",
         "docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir of medium Memory at /dev/shm"});
    return;
  }
  findings.push_back({"shared_memory", Verdict::ok,
                      size ? fmt::format("/dev/shm has {}", format_bytes(*size)) : "/dev/shm is half of the memory", "",
                      ""});
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
  check_locked_memory(patient, findings);
  check_open_files(patient, findings);
  check_shared_memory(patient, findings);
  check_huge_pages(patient, findings);
}

}  // namespace deep_ep::tools
