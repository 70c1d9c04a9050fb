#include "csrc/rdma/verbs/functions.hpp"

#include <dlfcn.h>
#include <link.h>

#include <cstddef>
#include <cstring>
#include <filesystem>
#include <span>

#include "csrc/rdma/verbs/libraries.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"

namespace deep_ep::rdma::verbs {
namespace {

/// Fills `table` with the functions of these names, in their order. The library stays loaded until the process ends:
/// verbs providers leave threads and exit handlers behind.
LoadedLibrary load(const char* name, std::span<const char* const> symbols, void* table) {
  LoadedLibrary report{.name = name};
  void* const library = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    report.error = ::dlerror();
    return report;
  }
  link_map* map = nullptr;
  ::dlinfo(library, RTLD_DI_LINKMAP, &map);
  std::error_code error;
  report.path = std::filesystem::weakly_canonical(map->l_name, error).string();
  if (error) report.path = map->l_name;
  std::vector<std::string> missing;
  for (std::size_t i = 0; i < symbols.size(); ++i) {
    void* const function = ::dlsym(library, symbols[i]);
    if (function == nullptr) missing.emplace_back(symbols[i]);
    std::memcpy(static_cast<std::byte*>(table) + i * sizeof function, &function, sizeof function);
  }
  if (!missing.empty()) report.error = fmt::format("{} lacks {}", report.path, fmt::join(missing, ", "));
  log::info("rdma: {}", report.text());
  return report;
}

#define DEEP_EP_SYMBOL(prefix, name) #prefix #name,
constexpr const char* kVerbsSymbols[] = {DEEP_EP_VERBS_FUNCTIONS(DEEP_EP_SYMBOL)};
constexpr const char* kMlx5Symbols[] = {DEEP_EP_MLX5_FUNCTIONS(DEEP_EP_SYMBOL)};
static_assert(sizeof kVerbsSymbols == sizeof(VerbsFunctions) && sizeof kMlx5Symbols == sizeof(Mlx5Functions));

struct Libraries {
  VerbsFunctions verbs{};
  Mlx5Functions mlx5{};
  LoadedLibrary libibverbs = load("libibverbs.so.1", kVerbsSymbols, &verbs);
  LoadedLibrary libmlx5 = load("libmlx5.so.1", kMlx5Symbols, &mlx5);  // last: it loads libibverbs too
};

// Loaded once: libraries do not appear while a program runs.
const Libraries& libraries() {
  static const Libraries loaded;
  return loaded;
}

}  // namespace

const VerbsFunctions& verbs_functions() {
  if (libraries().libibverbs.usable()) return libraries().verbs;
  fail<SystemError>(
      "RDMA was asked for, but libibverbs cannot be used: {}. Install the user-space libraries of rdma-core 34 or "
      "later (Debian and Ubuntu: libibverbs1 and ibverbs-providers)",
      libraries().libibverbs.error);
}

const Mlx5Functions& mlx5_functions() {
  if (libraries().libmlx5.usable()) return libraries().mlx5;
  fail<SystemError>(
      "GPU-driven RDMA was asked for, but libmlx5 cannot be used: {}. Install the user-space libraries of rdma-core "
      "35 or later (Debian and Ubuntu: ibverbs-providers), or set DEEP_EP_NIC_HANDLER=cpu",
      libraries().libmlx5.error);
}

std::vector<LoadedLibrary> report_libraries() { return {libraries().libibverbs, libraries().libmlx5}; }

std::string LoadedLibrary::text() const { return name + ": " + (usable() ? path : "not usable: " + error); }

}  // namespace deep_ep::rdma::verbs
