#include "tools/doctor/bundle.hpp"
#include "tools/common/variables.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <system_error>

#include "csrc/rdma/verbs/libraries.hpp"
#include "csrc/support/environment.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/unique_fd.hpp"
#include "tools/common/version.hpp"
#include "tools/doctor/machine.hpp"

namespace deep_ep::tools {
namespace {

constexpr std::size_t kMostLog = std::size_t{256} << 10;

/// Files of the machine, by their paths.
std::string files_text(const Patient& patient) {
  std::vector<std::string> files = {"/proc/sys/kernel/osrelease",
                                    "/proc/driver/nvidia/version",
                                    "/proc/driver/nvidia/params",
                                    "/sys/module/nvidia/version",
                                    "/sys/module/mlx5_core/version",
                                    "/sys/module/nvidia_peermem/version",
                                    "/etc/os-release",
                                    "/proc/self/limits",
                                    "/proc/self/cgroup"};
  for (const rdma::Nic& nic : patient.nics) {
    for (const rdma::NicPort& port : nic.ports) {
      const std::string folder = fmt::format("/sys/class/infiniband/{}/ports/{}", nic.name, port.number);
      for (const char* counters : {"counters", "hw_counters"}) {
        for (const std::string& name : patient.root.list(folder + "/" + counters)) {
          files.push_back(fmt::format("{}/{}/{}", folder, counters, name));
        }
      }
    }
  }
  std::string text;
  for (const std::string& file : files) {
    const std::string content = patient.root.text(file);
    if (!content.empty()) text += fmt::format("{}: {}\n", file, content.substr(0, 16384));
  }
  return text;
}

bool names_a_secret(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  // A report needs these: they are no secrets.
  for (const char* harmless : {"NCCL_IB_PKEY", "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"}) {
    if (name == harmless) return false;
  }
  constexpr std::array kWords = {"PASS", "PWD",    "SECRET", "TOKEN",  "KEY",     "CREDENTIAL", "CREDS",
                                 "AUTH", "COOKIE", "JWT",    "BEARER", "PRIVATE", "SIGNATURE",  "CERT"};
  return std::ranges::any_of(kWords, [&](const char* word) { return name.find(word) != std::string::npos; });
}

/// scheme://user:password@host
bool has_a_password(const std::string& value) {
  const std::size_t begin = value.find("://");
  if (begin == std::string::npos) return false;
  const std::size_t at = value.find('@', begin);
  return at != std::string::npos && value.find(':', begin + 3) < at;
}

/// Variables that RDMA libraries and launchers read, those with secrets in their names without values. No others.
std::string variables_for_reports() {
  std::string text;
  for (const std::string& name : tools::names_of_process()) {
    for (const char* prefix : {"DEEP_EP_",    "NVSHMEM_", "NCCL_",      "UCX_", "CUDA_",
                               "MLX5_",       "RDMAV_",   "IBV_",       "EP_",  "NVIDIA_",
                               "TORCH_NCCL_", "LD_",      "MASTER_",    "RANK", "WORLD_SIZE",
                               "LOCAL_",      "SLURM_",   "OMPI_COMM_", "PMI_", "JOB_COMPLETION_INDEX",
                               "VLLM_",       "SGLANG_"}) {
      if (!name.starts_with(prefix)) continue;
      const std::string value = environment::of_process(name.c_str()).value_or("");
      text += fmt::format("{}={}\n", name, names_a_secret(name) || has_a_password(value) ? "(left out)" : value);
      break;
    }
  }
  return text;
}

/// The end of the file that this process's variables name, if they name one.
std::string log_text(const Patient& patient) {
  const auto file = patient.environment("DEEP_EP_LOG_FILE");
  if (!file || file->find('%') != std::string::npos || !patient.root.is_this_machine()) return {};
  return end_of_file(*file, kMostLog);
}

}  // namespace

std::string end_of_file(const std::string& path, std::size_t most) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) return {};  // to open a pipe would wait for a writer
  const std::uintmax_t size = std::filesystem::file_size(path, error);
  std::ifstream file(path, std::ios::binary);
  if (error || !file) return {};
  const std::uintmax_t count = std::min<std::uintmax_t>(size, most);
  file.seekg(static_cast<std::streamoff>(size - count));
  std::string text(static_cast<std::size_t>(count), '\0');
  file.read(text.data(), static_cast<std::streamsize>(count));
  text.resize(static_cast<std::size_t>(std::max<std::streamsize>(file.gcount(), 0)));
  return text;
}

std::string bundle_of(const Patient& patient, const Findings& findings,
                      const std::vector<std::pair<std::string, std::string>>& more) {
  std::string versions = version_text() + "\n";
  for (const auto& library : rdma::verbs::report_libraries()) versions += library.text() + "\n";
  std::vector<std::pair<std::string, std::string>> parts = {
      {"machine", to_text(report_machine(patient, full_version()))},
      {"doctor", examination_text(patient, findings)},
      {"variables", variables_for_reports()},
      {"versions", versions},
      {"files", files_text(patient)}};
  parts.insert(parts.end(), more.begin(), more.end());
  parts.emplace_back("the end of the library's log", log_text(patient));
  parts.emplace_back(
      "json", examination_json(patient, findings).dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
  std::string text;
  for (const auto& [title, part] : parts) {
    if (!part.empty()) text += fmt::format("===== {} =====\n{}\n", title, printable(part));
  }
  return text;
}

void write_bundle(const std::string& file, const std::string& text) {
  const UniqueFd out(::open(file.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
  std::string_view rest = text;
  while (out && !rest.empty()) {
    const ssize_t count = ::write(out.get(), rest.data(), rest.size());
    if (count < 0 && errno != EINTR) break;
    rest.remove_prefix(static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  }
  if (rest.empty()) return;
  const std::string why = errno_text(errno);
  if (out) ::unlink(file.c_str());
  fail<SystemError>("--bundle {}: cannot write it: {}", file, why);
}

}  // namespace deep_ep::tools
