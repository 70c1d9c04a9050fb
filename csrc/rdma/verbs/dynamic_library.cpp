#include "csrc/rdma/verbs/dynamic_library.hpp"

#include <dlfcn.h>
#include <link.h>

#include <filesystem>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {

DynamicLibrary::DynamicLibrary(const std::vector<std::string>& names) {
  std::vector<std::string> refusals;
  for (const std::string& name : names) {
    handle_ = ::dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ != nullptr) break;
    const char* reason = ::dlerror();
    refusals.emplace_back(reason != nullptr ? reason : name + ": no reason given");
  }
  if (handle_ == nullptr) fail<SystemError>("{}", fmt::join(refusals, "; "));

  link_map* map = nullptr;
  if (::dlinfo(handle_, RTLD_DI_LINKMAP, &map) == 0 && map->l_name != nullptr) {
    std::error_code error;
    const std::filesystem::path resolved = std::filesystem::canonical(map->l_name, error);
    path_ = error ? std::string(map->l_name) : resolved.string();
  }
}

void* DynamicLibrary::find(const char* symbol) const noexcept { return ::dlsym(handle_, symbol); }

}  // namespace deep_ep::rdma::verbs
