// A shared library that is opened while the program runs, and says where it came from.
#pragma once

#include <string>
#include <vector>

namespace deep_ep::rdma::verbs {

class DynamicLibrary {
 public:
  /// Opens the first of `names` that the loader finds. SystemError says what the loader answered to each name.
  /// The library stays loaded until the process ends: verbs providers leave threads and exit handlers behind.
  explicit DynamicLibrary(const std::vector<std::string>& names);

  /// The address of a symbol in its default version; null when the library has none.
  void* find(const char* symbol) const noexcept;

  /// The file that was loaded, with symbolic links resolved.
  const std::string& path() const { return path_; }

 private:
  void* handle_ = nullptr;
  std::string path_;
};

}  // namespace deep_ep::rdma::verbs
