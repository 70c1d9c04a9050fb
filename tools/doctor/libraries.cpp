// `deep_ep doctor`: libibverbs, libmlx5, and whether the copies that load belong together.
//
// Both come from rdma-core and share private symbols (IBVERBS_PRIVATE_<n>), and libibverbs looks for its drivers under
// names with that number (libmlx5-rdmav<n>.so). Two releases on one library path, one of the host and one of the image,
// are the usual way to lose RDMA in a container.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <set>

#include "csrc/support/text.hpp"
#include "tools/doctor/checks.hpp"

namespace deep_ep::tools {
namespace {

namespace fs = std::filesystem;

// Folders in a file of ld.so.conf's format; `include` lines name files in /etc/ld.so.conf.d by a pattern.
void read_loader_folders(const topology::SystemRoot& root, const std::string& file, std::vector<std::string>& folders) {
  const std::string text = root.text(file);
  for (std::string_view line : split(text, '\n')) {
    line = trim(line.substr(0, line.find('#')));
    if (line.starts_with('/')) folders.emplace_back(line);
  }
}

/// The folders that the loader searches, in its order.
std::vector<std::string> searched_folders(const Patient& patient) {
  std::vector<std::string> folders;
  const std::string path = patient.environment("LD_LIBRARY_PATH").value_or("");
  for (const std::string_view folder : split(path, ':')) {
    if (!folder.empty()) folders.emplace_back(folder);
  }
  read_loader_folders(patient.root, "/etc/ld.so.conf", folders);
  for (const std::string& name : patient.root.list("/etc/ld.so.conf.d")) {
    if (name.ends_with(".conf")) read_loader_folders(patient.root, "/etc/ld.so.conf.d/" + name, folders);
  }
  for (const char* folder : {"/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu", "/lib/aarch64-linux-gnu",
                             "/usr/lib/aarch64-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib"}) {
    folders.emplace_back(folder);
  }
  return folders;
}

/// Where copies lie that a change of LD_LIBRARY_PATH would bring in.
const std::vector<std::string> kOtherFolders = {"/usr/local/nvidia/lib64", "/usr/local/gib/lib64", "/usr/local/lib",
                                                "/opt/mellanox/lib64"};

constexpr std::string_view kDigits = "0123456789";

// The digits behind the first IBVERBS_PRIVATE_ that has some. By hand: a file may be damaged, or no library at all, and
// regular expressions recurse.
std::string private_abi_of(std::string_view bytes) {
  constexpr std::string_view kName = "IBVERBS_PRIVATE_";
  for (std::size_t at = bytes.find(kName); at != std::string_view::npos; at = bytes.find(kName, at + 1)) {
    const std::string_view behind = bytes.substr(at + kName.size(), 4);
    const std::string_view digits = behind.substr(0, behind.find_first_not_of(kDigits));
    if (!digits.empty()) return std::string(digits);
  }
  return {};
}

// The path with "/lib%s-rdmav<n>.so" at its end, a text of its own in the file.
std::string provider_files_of(std::string_view bytes) {
  constexpr std::string_view kName = "/lib%s-rdmav";
  constexpr std::string_view kOfAPath = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_./+-";
  const std::size_t at = bytes.find(kName);
  if (at == std::string_view::npos) return {};
  const std::size_t begin = bytes.substr(0, at).find_last_not_of(kOfAPath) + 1;
  const std::size_t end = std::min(bytes.find_first_not_of(kDigits, at + kName.size()), bytes.size());
  if (bytes[begin] != '/' || bytes.substr(end, 3) != ".so") return {};
  return std::string(bytes.substr(begin, end + 3 - begin));
}

std::string show(const LibraryCopy& copy) {
  return fmt::format("{}/{} (private ABI {})", copy.folder, copy.file,
                     copy.private_abi.empty() ? "not known" : copy.private_abi);
}

constexpr const char* kOneRelease =
    "make sure that only one release is found: rdma-core of the image, not of the host; put its folder first in "
    "LD_LIBRARY_PATH";

// The driver for mlx5 that this libibverbs loads by itself.
void check_provider(const Patient& patient, const LibraryCopy& verbs, Findings& findings) {
  std::string file = verbs.provider_files;
  const std::size_t mark = file.find("%s");
  if (mark == std::string::npos) return;
  file.replace(mark, 2, "mlx5");
  if (patient.root.exists(file)) return;
  findings.push_back(
      {"libraries", Verdict::error, fmt::format("{} wants {}, which does not exist", show(verbs), file),
       fmt::format("it finds no mlx5 device: \"couldn't load driver '{}'\"", fs::path(file).filename().string()),
       fmt::format("install the drivers of that release (ibverbs-providers), or {}", kOneRelease)});
}

void check_other_copies(const std::vector<LibraryCopy>& copies, Findings& findings) {
  for (const LibraryCopy& copy : copies) {
    if (copy.private_abi == copies.front().private_abi || copy.private_abi.empty()) continue;
    findings.push_back({"libraries", Verdict::warning,
                        fmt::format("another release lies in {}; {} is what loads", show(copy), show(copies.front())),
                        "a process with another LD_LIBRARY_PATH may mix the two", kOneRelease});
  }
}

}  // namespace

std::vector<LibraryCopy> find_library(const Patient& patient, const std::string& name) {
  std::vector<LibraryCopy> copies;
  std::set<std::string> seen;
  const auto look = [&](const std::vector<std::string>& folders, bool searched) {
    for (const std::string& folder : folders) {
      const auto resolved = patient.root.resolve(fmt::format("{}/{}", folder, name));
      if (!resolved || !seen.insert(*resolved).second) continue;
      // The text within the file, not the ELF tables: names of versions are plain strings in both.
      const std::string bytes = patient.root.bytes(*resolved);
      copies.push_back(
          {folder, fs::path(*resolved).filename().string(), private_abi_of(bytes), provider_files_of(bytes), searched});
    }
  };
  look(searched_folders(patient), true);
  look(kOtherFolders, false);
  return copies;
}

void check_libraries(const Patient& patient, Findings& findings) {
  for (const char* variable : {"RDMAV_DRIVERS", "IBV_DRIVERS"}) {
    if (const auto value = patient.environment(variable)) {
      findings.push_back(
          {"libraries", Verdict::warning, fmt::format("{}={}", variable, *value),
           "libibverbs loads these drivers besides those it finds; processes started without the variable "
           "do not",
           "unset it, and install the drivers where libibverbs looks for them"});
    }
  }
  const std::vector<LibraryCopy> verbs = find_library(patient, "libibverbs.so.1");
  const std::vector<LibraryCopy> mlx5 = find_library(patient, "libmlx5.so.1");
  if (verbs.empty() || !verbs.front().searched) {
    findings.push_back(
        {"libraries", patient.nics.empty() ? Verdict::note : Verdict::error,
         verbs.empty() ? "libibverbs.so.1 is not on this machine"
                       : fmt::format("the loader does not find {}", show(verbs.front())),
         "without it there is no RDMA; everything else works",
         patient.nics.empty() ? "" : "install libibverbs1 and ibverbs-providers (names of Debian and Ubuntu)"});
    return;
  }
  const std::size_t findings_before = findings.size();
  const LibraryCopy& first = verbs.front();
  if (mlx5.empty() || !mlx5.front().searched) {
    findings.push_back({"libraries", Verdict::warning, "libmlx5.so.1 is not where the loader looks",
                        "mlx5 devices work with the handler cpu at most", "install ibverbs-providers"});
  } else if (first.private_abi != mlx5.front().private_abi) {
    findings.push_back(
        {"libraries", Verdict::error,
         fmt::format("{} and {} are of different releases", show(first), show(mlx5.front())),
         fmt::format("they do not load together: \"version 'IBVERBS_PRIVATE_{}' not found\"", mlx5.front().private_abi),
         kOneRelease});
  }
  check_provider(patient, first, findings);
  check_other_copies(verbs, findings);
  if (findings.size() == findings_before) {
    findings.push_back(
        {"libraries", Verdict::ok, fmt::format("{} and {} fit together", show(first), show(mlx5.front()))});
  }
}

}  // namespace deep_ep::tools
