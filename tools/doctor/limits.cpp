// `deep_ep doctor`: what the system lets a process have: locked memory, open files, /dev/shm.
#include <sys/statvfs.h>

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

/// "unlimited" is as much as there can be; nothing where the file does not say.
struct Limit {
  std::uint64_t soft = 0;
  std::uint64_t hard = 0;  ///< as far as the process may raise it by itself
};
std::optional<Limit> read_limit(const Patient& patient, std::string_view name) {
  std::istringstream words(rest_of_line(patient.root.text("/proc/self/limits"), name));
  const auto next = [&]() -> std::optional<std::uint64_t> {
    std::string word;
    words >> word;
    return word == "unlimited" ? UINT64_MAX : parse_number<std::uint64_t>(word);
  };
  const auto soft = next();
  if (!soft) return std::nullopt;
  return Limit{*soft, next().value_or(*soft)};
}

void check_locked_memory(const Patient& patient, Findings& findings) {
  const auto limit = read_limit(patient, "Max locked memory");
  if (!limit || patient.nics.empty()) return;
  constexpr int kIpcLock = 14;
  const bool may_lock_anyway = (capabilities_of_process(patient.root) >> kIpcLock & 1) != 0;
  // Below the first not even queue pairs can be made. A rank's rings take some MiB, those of a large job some tens;
  // NCCL and others register as much in the same process.
  constexpr std::uint64_t kLeast = std::uint64_t{4} << 20;
  constexpr std::uint64_t kEnough = std::uint64_t{256} << 20;
  const std::string limited = fmt::format("locked memory is limited to {}", format_bytes(limit->soft));
  if (limit->soft >= kEnough || may_lock_anyway) {
    findings.push_back({"locked_memory", Verdict::ok,
                        limit->soft == UINT64_MAX ? "locked memory is not limited"
                        : may_lock_anyway         ? "locked memory is limited, but CAP_IPC_LOCK lifts the limit"
                                                  : limited});
    return;
  }
  findings.push_back({"locked_memory", limit->soft < kLeast ? Verdict::error : Verdict::warning, limited,
                      "registrations of host memory beyond it fail with ENOMEM",
                      "ulimit -l unlimited; in a container, the capability IPC_LOCK or the runtime's memlock limit"});
}

void check_open_files(const Patient& patient, Findings& findings) {
  const auto limit = read_limit(patient, "Max open files");
  if (!limit) return;
  // A program with CUDA and Python has some 250 files open by itself; a rank has sockets to others, and descriptors of
  // the memory of those of its node.
  constexpr std::uint64_t kLeast = 1024;
  const bool enough = limit->soft >= kLeast;
  findings.push_back({"open_files",
                      enough                  ? Verdict::ok
                      : limit->hard >= kLeast ? Verdict::warning
                                              : Verdict::error,
                      limit->soft == UINT64_MAX ? "open files are not limited"
                                                : fmt::format("a process may have {} open files", limit->soft),
                      enough ? "" : "sockets and the memory of peers cannot be opened: \"Too many open files\"",
                      enough ? "" : "ulimit -n 1048576; in a container, the runtime's nofile limit"});
}

// The size of a tmpfs in its mount options ("size=65536k"); nothing: half of the memory.
std::optional<std::uint64_t> tmpfs_size(std::string_view options) {
  for (const std::string_view option : split(options, ',')) {
    if (!option.starts_with("size=")) continue;
    const std::string_view text = option.substr(5);
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc()) return std::nullopt;
    const char unit = end == text.data() + text.size() ? 'b' : *end;
    return value << (unit == 'k' ? 10 : unit == 'm' ? 20 : unit == 'g' ? 30 : 0);
  }
  return std::nullopt;
}

/// The free bytes; in a copy of files, all of them.
std::optional<std::uint64_t> shared_memory(const Patient& patient) {
  if (patient.root.is_this_machine()) {
    struct ::statvfs mount {};
    if (::statvfs("/dev/shm", &mount) != 0) return std::nullopt;
    return mount.f_bavail * mount.f_frsize;
  }
  const std::string mounts = patient.root.text("/proc/mounts");
  std::optional<std::uint64_t> size;  // of the last one, which is on top
  for (const std::string_view line : split(mounts, '\n')) {
    const std::vector<std::string_view> fields = split(line, ' ');
    if (fields.size() > 3 && fields[1] == "/dev/shm") size = tmpfs_size(fields[3]);
  }
  return size;
}

void check_shared_memory(const Patient& patient, Findings& findings) {
  // NCCL and the workers of PyTorch are known to want so much. This library's own shared memory does not lie there.
  constexpr std::uint64_t kOfOthers = std::uint64_t{1} << 30;
  const auto memory = shared_memory(patient);
  if (!memory) return;
  const std::string text = fmt::format("/dev/shm has {}", format_bytes(*memory));
  if (*memory >= kOfOthers) {
    findings.push_back({"shared_memory", Verdict::ok, text});
    return;
  }
  findings.push_back(
      {"shared_memory", Verdict::warning, text,
       "programs that share memory there, such as NCCL and PyTorch's workers, end with SIGBUS or ENOSPC; this library "
       "does not",
       "docker run --shm-size=8g or --ipc=host; in Kubernetes an emptyDir of medium Memory at /dev/shm"});
}

}  // namespace

void check_limits(const Patient& patient, Findings& findings) {
  check_locked_memory(patient, findings);
  check_open_files(patient, findings);
  check_shared_memory(patient, findings);
}

}  // namespace deep_ep::tools
