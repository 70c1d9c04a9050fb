#include "csrc/rdma/verbs/functions.hpp"

#include <dlfcn.h>
#include <link.h>

#include <filesystem>

#include "csrc/rdma/verbs/libraries.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {
namespace {

template <class Functions>
struct Loaded {
  Functions functions{};
  LoadedLibrary report;
};

/// `each(functions, find)` calls find(function, its name in the library) for each. The library stays loaded until the
/// process ends: verbs providers leave threads and exit handlers behind.
template <class Functions, class Each>
Loaded<Functions> load(const char* name, Each each) {
  Loaded<Functions> loaded;
  LoadedLibrary& report = loaded.report;
  report.name = name;
  void* const library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    report.error = ::dlerror();
    return loaded;
  }
  link_map* map = nullptr;
  ::dlinfo(library, RTLD_DI_LINKMAP, &map);
  std::error_code error;
  report.path = std::filesystem::weakly_canonical(map->l_name, error).string();
  if (error) report.path = map->l_name;
  std::vector<std::string> missing;
  each(loaded.functions, [&]<class Function>(Function& function, const char* symbol) {
    function = reinterpret_cast<Function>(::dlsym(library, symbol));
    if (function == nullptr) missing.emplace_back(symbol);
  });
  if (!missing.empty()) report.error = fmt::format("{} lacks {}", report.path, fmt::join(missing, ", "));
  log::info("rdma: {}", report.text());
  return loaded;
}

#define DEEP_EP_FIND(prefix, name) find(functions.name, #prefix #name);

// Loaded once: libraries do not appear while a program runs.
const Loaded<VerbsFunctions>& loaded_verbs() {
  static const Loaded<VerbsFunctions> loaded = load<VerbsFunctions>(
      "libibverbs.so.1", [](VerbsFunctions& functions, const auto& find) { DEEP_EP_VERBS_FUNCTIONS(DEEP_EP_FIND) });
  return loaded;
}

// libmlx5 loads libibverbs too. Loading libibverbs first keeps the report true.
const Loaded<Mlx5Functions>& loaded_mlx5() {
  loaded_verbs();
  static const Loaded<Mlx5Functions> loaded = load<Mlx5Functions>(
      "libmlx5.so.1", [](Mlx5Functions& functions, const auto& find) { DEEP_EP_MLX5_FUNCTIONS(DEEP_EP_FIND) });
  return loaded;
}

}  // namespace

const VerbsFunctions& verbs_functions() {
  const Loaded<VerbsFunctions>& loaded = loaded_verbs();
  if (!loaded.report.usable()) {
    fail<SystemError>(
        "RDMA was asked for, but libibverbs cannot be used: {}. Install the user-space libraries of rdma-core 34 or "
        "later (Debian and Ubuntu: libibverbs1 and ibverbs-providers)",
        loaded.report.error);
  }
  return loaded.functions;
}

const Mlx5Functions& mlx5_functions() {
  const Loaded<Mlx5Functions>& loaded = loaded_mlx5();
  if (!loaded.report.usable()) {
    fail<SystemError>(
        "GPU-driven RDMA was asked for, but libmlx5 cannot be used: {}. Install the user-space libraries of rdma-core "
        "35 or later (Debian and Ubuntu: ibverbs-providers), or set DEEP_EP_NIC_HANDLER=cpu",
        loaded.report.error);
  }
  return loaded.functions;
}

std::vector<LoadedLibrary> report_libraries() { return {loaded_verbs().report, loaded_mlx5().report}; }

std::string LoadedLibrary::text() const { return name + ": " + (usable() ? path : "not usable: " + error); }

}  // namespace deep_ep::rdma::verbs
