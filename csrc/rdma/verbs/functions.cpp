#include "csrc/rdma/verbs/functions.hpp"

#include <dlfcn.h>
#include <link.h>

#include <filesystem>
#include <system_error>
#include <utility>

#include "csrc/rdma/verbs/libraries.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {
namespace {

/// Looks up one symbol after another in a library, and remembers what is missing.
struct Symbols {
  void* library;
  std::vector<std::string> missing = {};

  template <class Function>
  void find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(::dlsym(library, name));
    if (function == nullptr) missing.emplace_back(name);
  }
};

void read_symbols(VerbsFunctions& f, Symbols& symbols) {
#define DEEP_EP_FIND(name) symbols.find(f.name, "ibv_" #name);
  DEEP_EP_VERBS_FUNCTIONS(DEEP_EP_FIND)
#undef DEEP_EP_FIND
}

void read_symbols(Mlx5Functions& f, Symbols& symbols) {
#define DEEP_EP_FIND_DIRECT(name) symbols.find(f.name, "mlx5dv_" #name);
#define DEEP_EP_FIND(name) symbols.find(f.name, "mlx5dv_devx_" #name);
  DEEP_EP_MLX5_FUNCTIONS(DEEP_EP_FIND_DIRECT, DEEP_EP_FIND)
#undef DEEP_EP_FIND_DIRECT
#undef DEEP_EP_FIND
}

/// The file that was loaded, with symbolic links resolved.
std::string path_of(void* library) {
  link_map* map = nullptr;
  if (::dlinfo(library, RTLD_DI_LINKMAP, &map) != 0 || map->l_name == nullptr) return {};
  std::error_code error;
  const std::filesystem::path resolved = std::filesystem::canonical(map->l_name, error);
  return error ? std::string(map->l_name) : resolved.string();
}

template <class Functions>
struct Loaded {
  Functions functions{};
  LoadedLibrary report;
};

/// The library stays loaded until the process ends: verbs providers leave threads and exit handlers behind.
template <class Functions>
Loaded<Functions> load(const char* name) {
  Loaded<Functions> loaded;
  LoadedLibrary& report = loaded.report;
  report.name = name;
  Symbols symbols{::dlopen(name, RTLD_NOW | RTLD_LOCAL)};
  if (symbols.library == nullptr) {
    const char* reason = ::dlerror();
    report.error = reason != nullptr ? reason : fmt::format("{}: no reason given", name);
    return loaded;
  }
  report.path = path_of(symbols.library);
  read_symbols(loaded.functions, symbols);
  if (!symbols.missing.empty()) {
    report.error = fmt::format("{} lacks {}", report.path, fmt::join(symbols.missing, ", "));
  }
  log::info("rdma: {}", report.text());
  return loaded;
}

// Loaded once: libraries do not appear while a program runs.
const Loaded<VerbsFunctions>& loaded_verbs() {
  static const Loaded<VerbsFunctions> loaded = load<VerbsFunctions>("libibverbs.so.1");
  return loaded;
}

// libmlx5 loads libibverbs too. Loading libibverbs first keeps the report true.
const Loaded<Mlx5Functions>& loaded_mlx5() {
  loaded_verbs();
  static const Loaded<Mlx5Functions> loaded = load<Mlx5Functions>("libmlx5.so.1");
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

void require_libraries() { verbs_functions(); }

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

int query_port(const VerbsFunctions& functions, ibv_context* context, int port, ibv_port_attr* attributes) {
  *attributes = {};
  verbs_context* extended = verbs_get_ctx_op(context, query_port);
  if (extended != nullptr) {
    return extended->query_port(context, static_cast<std::uint8_t>(port), attributes, sizeof(*attributes));
  }
  return functions.query_port(context, static_cast<std::uint8_t>(port),
                              reinterpret_cast<_compat_ibv_port_attr*>(attributes));
}

}  // namespace deep_ep::rdma::verbs
