// `deep_ep doctor --pid N`: libraries of which a process has two copies.
#include <fmt/format.h>

#include <map>
#include <set>
#include <sstream>
#include <string>

#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {
namespace {

struct Watched {
  const char* stem;
  const char* meaning;
};

constexpr Watched kWatched[] = {
    {"libibverbs.so", "devices opened by one are not known to the other"},
    {"libmlx5.so", "devices opened by one are not known to the other"},
    {"libnccl.so", "communicators of one crash in the other"},
    {"libnvshmem_host.so", "its host state is not that of the device code: hangs without a message"},
    {"libcudart.so", "streams and errors of one are known to the other, but their versions may differ"},
    {"libdeep_ep.so", "buffers of one are not known to the other"},
};

/// The library of a path of /proc/PID/maps, as one of kWatched; null for others.
const Watched* watched(std::string_view file) {
  for (const Watched& library : kWatched) {
    if (file.starts_with(library.stem)) return &library;
  }
  return nullptr;
}

}  // namespace

void check_process(const Patient& patient, Findings& findings) {
  if (patient.pid <= 0) return;
  const auto maps = patient.root.read(fmt::format("/proc/{}/maps", patient.pid));
  if (!maps) {
    findings.push_back({"process", Verdict::error, fmt::format("/proc/{}/maps cannot be read", patient.pid),
                        "there is no such process, or it is another user's", "the number of a process of this user"});
    return;
  }
  std::map<const Watched*, std::set<std::string>> copies;
  std::istringstream lines(*maps);
  for (std::string line; std::getline(lines, line);) {
    const std::size_t slash = line.find('/');
    if (slash == std::string::npos) continue;
    const std::string path = line.substr(slash);
    if (const Watched* library = watched(std::string_view(path).substr(path.rfind('/') + 1)))
      copies[library].insert(path);
  }
  const std::size_t before = findings.size();
  for (const auto& [library, paths] : copies) {
    if (paths.size() < 2) continue;
    findings.push_back({"process", Verdict::warning,
                        fmt::format("process {} has {} copies of {}: {}", patient.pid, paths.size(), library->stem,
                                    fmt::join(paths, ", ")),
                        library->meaning, "one copy on the loader's path; unset LD_PRELOAD"});
  }
  if (findings.size() == before) {
    findings.push_back({"process", Verdict::ok,
                        fmt::format("process {} has no library of {} twice", patient.pid, copies.size()), "", ""});
  }
}

}  // namespace deep_ep::tools
