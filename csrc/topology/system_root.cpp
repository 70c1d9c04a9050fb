#include "csrc/topology/system_root.hpp"

#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <fstream>
#include <system_error>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"

namespace deep_ep::topology {
namespace fs = std::filesystem;
namespace {

// As many as the kernel follows.
constexpr int kMostLinks = 40;
// No text about a machine is longer; a damaged copy of one may have files without end.
constexpr std::size_t kMostText = std::size_t{8} << 20;

/// Follows links by hand, `links` more at most: in a copied machine an absolute one points into the copy, not into the
/// machine that reads it.
std::optional<fs::path> follow(const fs::path& prefix, const fs::path& path, int& links) {
  if (!path.has_relative_path()) return "/";
  auto folder = follow(prefix, path.parent_path(), links);
  const fs::path part = path.filename();
  if (!folder || part.empty() || part == ".") return folder;
  if (part == "..") return folder->parent_path();
  const fs::path next = *folder / part, place = prefix / next.relative_path();
  std::error_code error;
  const fs::file_status status = fs::symlink_status(place, error);
  if (!fs::is_symlink(status)) return fs::exists(status) ? std::optional(next) : std::nullopt;
  return --links < 0 ? std::nullopt : follow(prefix, *folder / fs::read_symlink(place, error), links);
}

}  // namespace

SystemRoot::SystemRoot(fs::path prefix) : prefix_(std::move(prefix)) {
  std::error_code error;
  if (!fs::is_directory(prefix_, error)) {
    fail<InvalidArgument>("sysroot '{}' is not a directory; it must hold another machine's /sys, /proc, ...",
                          prefix_.string());
  }
  prefix_ = fs::canonical(prefix_);
}

std::optional<std::string> SystemRoot::resolve(std::string_view path) const {
  int links = kMostLinks;
  const auto resolved = follow(prefix_, path, links);
  return resolved ? std::optional(resolved->string()) : std::nullopt;
}

std::optional<fs::path> SystemRoot::place_of(std::string_view path) const {
  // For this machine the kernel follows links, which is faster.
  if (is_this_machine()) return fs::path(path);
  const auto resolved = resolve(path);
  if (!resolved) return std::nullopt;
  return prefix_ / fs::path(*resolved).relative_path();
}

std::string SystemRoot::bytes(std::string_view path, std::size_t most) const {
  const auto place = place_of(path);
  std::error_code error;
  if (!place || !fs::is_regular_file(*place, error)) return {};  // to open a FIFO would wait for a writer
  std::ifstream file(*place, std::ios::binary);
  std::string bytes;
  for (std::array<char, 1 << 16> block; file && bytes.size() < most;) {
    file.read(block.data(), block.size());
    bytes.append(block.data(), static_cast<std::size_t>(file.gcount()));
  }
  return file.bad() ? std::string() : bytes.substr(0, most);
}

std::string SystemRoot::text(std::string_view path) const { return std::string(trim(bytes(path, kMostText))); }

std::vector<std::string> SystemRoot::list(std::string_view path) const {
  std::vector<std::string> names;
  const auto place = place_of(path);
  if (!place) return names;
  std::error_code error;
  for (fs::directory_iterator it(*place, error), end; !error && it != end; it.increment(error)) {
    names.push_back(it->path().filename().string());
  }
  std::ranges::sort(names, [](const auto& a, const auto& b) { return ::strverscmp(a.c_str(), b.c_str()) < 0; });
  return names;
}

bool SystemRoot::exists(std::string_view path) const { return resolve(path).has_value(); }

bool SystemRoot::writable(std::string_view path) const {
  const auto resolved = resolve(path);
  if (!resolved) return false;
  return !is_this_machine() || ::access(resolved->c_str(), R_OK | W_OK) == 0;
}

std::string SystemRoot::link_name(std::string_view path) const {
  const auto resolved = resolve(path);
  return resolved ? fs::path(*resolved).filename().string() : std::string();
}

}  // namespace deep_ep::topology
