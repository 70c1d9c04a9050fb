#include "tools/doctor/tar.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "csrc/support/environment.hpp"
#include "csrc/support/unique_fd.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::tools {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kBlock = 512;
constexpr std::size_t kLongestName = 99;

/// A file of a tar archive, in the format that POSIX calls ustar.
std::string tar_member(const std::string& name, const std::string& content) {
  std::array<char, kBlock> header{};
  const auto put = [&](std::size_t at, const std::string& text) {
    std::memcpy(header.data() + at, text.data(), text.size());
  };
  put(0, name.substr(0, kLongestName));
  put(100, "0000644");
  put(108, "0000000");
  put(116, "0000000");
  put(124, fmt::format("{:011o}", content.size()));
  put(136, fmt::format("{:011o}", std::time(nullptr)));
  put(148, "        ");  // the checksum counts itself as spaces
  put(156, "0");
  put(257, std::string("ustar\00000", 8));
  unsigned sum = 0;
  for (const char byte : header) sum += static_cast<unsigned char>(byte);
  put(148, fmt::format("{:06o}", sum));
  header[154] = '\0';
  const std::size_t padding = (kBlock - content.size() % kBlock) % kBlock;
  return std::string(header.data(), kBlock) + content + std::string(padding, '\0');
}

bool names_a_secret(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  // What hides a number of tokens or a partition hides what a report is for.
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

bool write_whole(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = ::write(file, bytes.data(), bytes.size());
    if (count < 0 && errno != EINTR) return false;
    bytes.remove_prefix(static_cast<std::size_t>(std::max<ssize_t>(count, 0)));
  }
  return true;
}

}  // namespace

void write_tar(const std::string& file, const std::string& folder, const TarMembers& members) {
  std::error_code error;
  const fs::file_status status = fs::status(file, error);
  const bool in_place = fs::exists(status) && !fs::is_regular_file(status);
  // A new file with a name that nobody can foresee: in a folder that others may write to, a link could wait under one.
  std::string place = file + (in_place ? "" : ".XXXXXX");
  UniqueFd out(in_place ? ::open(file.c_str(), O_WRONLY | O_CLOEXEC) : ::mkostemp(place.data(), O_CLOEXEC));
  bool written = static_cast<bool>(out);
  const bool made = written && !in_place;
  for (const auto& [name, content] : members) {
    written = written && write_whole(out.get(), tar_member(folder + "/" + name, content));
  }
  written = written && write_whole(out.get(), std::string(2 * kBlock, '\0'));
  if (written && made) {
    fs::rename(place, file, error);
    written = !error;
  }
  if (written) return;
  if (made) fs::remove(place, error);
  throw SystemError(fmt::format("--bundle {}: cannot write it", file));
}

std::string variables_for_reports() {
  std::string text;
  for (const std::string& name : environment::names_of_process()) {
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

}  // namespace deep_ep::tools
