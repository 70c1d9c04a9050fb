// The files that describe a machine (/sys, /proc, /etc, /dev, libraries), under a prefix that tests and
// `deep_ep doctor --sysroot` may choose. Nothing else in csrc/topology and csrc/rdma/discovery opens
// files.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace deep_ep::topology {

class SystemRoot {
 public:
  /// This machine.
  SystemRoot() = default;
  /// A copy of another machine's files: "/sys/..." is read as `prefix`/sys/... Symbolic links never lead out of it.
  explicit SystemRoot(std::filesystem::path prefix);

  bool is_this_machine() const { return prefix_ == "/"; }

  /// The text of a file (its first 8 MiB), without white space around it; empty if it cannot be read (sysfs refuses
  /// some files with EINVAL, which also means "not there").
  std::string text(std::string_view path) const;
  /// The same, byte for byte: for libraries. At most `most` bytes.
  std::string bytes(std::string_view path, std::size_t most = std::size_t{64} << 20) const;
  /// Names in a folder, numbers in them in numerical order (mlx5_2 before mlx5_10); empty if there is no such folder.
  std::vector<std::string> list(std::string_view path) const;
  bool exists(std::string_view path) const;
  /// Whether this process may read and write the file. In another machine's copy: whether it exists.
  bool writable(std::string_view path) const;
  /// The path with all symbolic links followed, as seen from inside the root ("/sys/devices/..."); nothing if it leads
  /// nowhere.
  std::optional<std::string> resolve(std::string_view path) const;
  /// The last part of the target of a symbolic link ("mlx5_core" of ".../device/driver"); empty if there is none.
  std::string link_name(std::string_view path) const;

 private:
  /// Where to open `path`; nothing if it leads nowhere.
  std::optional<std::filesystem::path> place_of(std::string_view path) const;

  std::filesystem::path prefix_ = "/";
};

}  // namespace deep_ep::topology
