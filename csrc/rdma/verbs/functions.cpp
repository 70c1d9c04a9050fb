#include "csrc/rdma/verbs/functions.hpp"

#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <filesystem>
#include <mutex>
#include <optional>
#include <utility>

#include "csrc/rdma/verbs/libraries.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {
namespace {

/// A shared library that is opened while the program runs. It stays loaded until the process ends: verbs providers
/// leave threads and exit handlers behind.
class DynamicLibrary {
 public:
  /// SystemError says what the loader answered.
  explicit DynamicLibrary(const char* name) : handle_(::dlopen(name, RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) {
      const char* reason = ::dlerror();
      throw SystemError(reason != nullptr ? reason : fmt::format("{}: no reason given", name));
    }
    link_map* map = nullptr;
    if (::dlinfo(handle_, RTLD_DI_LINKMAP, &map) == 0 && map->l_name != nullptr) {
      std::error_code error;
      const std::filesystem::path resolved = std::filesystem::canonical(map->l_name, error);
      path_ = error ? std::string(map->l_name) : resolved.string();
    }
  }

  /// The address of a symbol in its default version; null if the library has none.
  void* find(const char* symbol) const noexcept { return ::dlsym(handle_, symbol); }
  /// The file that was loaded, with symbolic links resolved.
  const std::string& path() const { return path_; }

 private:
  void* handle_;
  std::string path_;
};

/// Looks up one symbol after another and remembers what is missing.
class SymbolReader {
 public:
  SymbolReader(const DynamicLibrary& library, LoadedLibrary& report) : library_(library), report_(report) {}

  template <class Function>
  void need(Function& function, const char* name) {
    find(function, name);
    if (function == nullptr) missing_.emplace_back(name);
  }
  template <class Function>
  void prefer(Function& function, const char* name) {
    find(function, name);
    if (function == nullptr) report_.fallbacks.emplace_back(name);
  }
  /// What few machines have a use for, so that its absence is nothing to report.
  template <class Function>
  void may(Function& function, const char* name) {
    find(function, name);
  }
  const std::vector<std::string>& missing() const { return missing_; }

 private:
  template <class Function>
  void find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(library_.find(name));
  }

  const DynamicLibrary& library_;
  LoadedLibrary& report_;
  std::vector<std::string> missing_;
};

void read_symbols(VerbsFunctions& f, SymbolReader& symbols) {
  symbols.need(f.get_device_list, "ibv_get_device_list");
  symbols.need(f.free_device_list, "ibv_free_device_list");
  symbols.need(f.get_device_name, "ibv_get_device_name");
  symbols.need(f.open_device, "ibv_open_device");
  symbols.need(f.close_device, "ibv_close_device");
  symbols.need(f.query_device, "ibv_query_device");
  symbols.need(f.query_port, "ibv_query_port");
  symbols.need(f.query_gid, "ibv_query_gid");
  symbols.need(f.alloc_pd, "ibv_alloc_pd");
  symbols.need(f.dealloc_pd, "ibv_dealloc_pd");
  symbols.need(f.reg_mr, "ibv_reg_mr");
  symbols.prefer(f.reg_mr_iova2, "ibv_reg_mr_iova2");
  symbols.prefer(f.reg_dmabuf_mr, "ibv_reg_dmabuf_mr");
  symbols.need(f.dereg_mr, "ibv_dereg_mr");
  symbols.need(f.create_cq, "ibv_create_cq");
  symbols.need(f.destroy_cq, "ibv_destroy_cq");
  symbols.need(f.create_qp, "ibv_create_qp");
  symbols.need(f.modify_qp, "ibv_modify_qp");
  symbols.need(f.query_qp, "ibv_query_qp");
  symbols.need(f.destroy_qp, "ibv_destroy_qp");
  symbols.need(f.create_ah, "ibv_create_ah");
  symbols.need(f.destroy_ah, "ibv_destroy_ah");
  symbols.need(f.get_async_event, "ibv_get_async_event");
  symbols.need(f.ack_async_event, "ibv_ack_async_event");
  symbols.need(f.event_type_str, "ibv_event_type_str");
  symbols.need(f.wc_status_str, "ibv_wc_status_str");
}

void read_symbols(Mlx5Functions& f, SymbolReader& symbols) {
  symbols.need(f.is_supported, "mlx5dv_is_supported");
  symbols.need(f.init_obj, "mlx5dv_init_obj");
  symbols.need(f.general_cmd, "mlx5dv_devx_general_cmd");
  symbols.need(f.obj_create, "mlx5dv_devx_obj_create");
  symbols.need(f.obj_modify, "mlx5dv_devx_obj_modify");
  symbols.need(f.obj_query, "mlx5dv_devx_obj_query");
  symbols.need(f.obj_destroy, "mlx5dv_devx_obj_destroy");
  symbols.prefer(f.qp_query, "mlx5dv_devx_qp_query");
  symbols.need(f.umem_reg_ex, "mlx5dv_devx_umem_reg_ex");
  symbols.need(f.umem_dereg, "mlx5dv_devx_umem_dereg");
  symbols.need(f.alloc_uar, "mlx5dv_devx_alloc_uar");
  symbols.need(f.free_uar, "mlx5dv_devx_free_uar");
  symbols.need(f.query_eqn, "mlx5dv_devx_query_eqn");
  symbols.need(f.create_event_channel, "mlx5dv_devx_create_event_channel");
  symbols.need(f.destroy_event_channel, "mlx5dv_devx_destroy_event_channel");
  symbols.need(f.subscribe_event, "mlx5dv_devx_subscribe_devx_event");
  symbols.need(f.get_event, "mlx5dv_devx_get_event");
  symbols.may(f.reg_dmabuf_mr, "mlx5dv_reg_dmabuf_mr");
  symbols.may(f.get_data_direct_sysfs_path, "mlx5dv_get_data_direct_sysfs_path");
}

template <class Functions>
struct Loaded {
  Functions functions{};
  LoadedLibrary report;
};

template <class Functions>
Loaded<Functions> load(const char* name) {
  Loaded<Functions> loaded;
  LoadedLibrary& report = loaded.report;
  report.name = name;
  try {
    const DynamicLibrary library(name);
    report.path = library.path();
    const LibraryVersion version = version_of_file(report.path);
    report.version = version.version;
    report.rdma_core = version.rdma_core;
    SymbolReader symbols(library, report);
    read_symbols(loaded.functions, symbols);
    if (!symbols.missing().empty()) {
      fail<SystemError>("{} lacks {}", report.path, fmt::join(symbols.missing(), ", "));
    }
    report.usable = true;
  } catch (const SystemError& error) {
    report.error = error.what();
  }
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

void log_once() {
  static std::once_flag once;
  std::call_once(once, [] {
    for (const std::string& line : describe(report_libraries())) log::info("rdma: {}", line);
  });
}

}  // namespace

const VerbsFunctions& verbs_functions() {
  const Loaded<VerbsFunctions>& loaded = loaded_verbs();
  if (!loaded.report.usable) {
    fail<SystemError>(
        "RDMA was asked for, but libibverbs cannot be used: {}. Install the user-space libraries of rdma-core 28 or "
        "later (Debian and Ubuntu: libibverbs1 and ibverbs-providers)",
        loaded.report.error);
  }
  log_once();
  return loaded.functions;
}

void require_libraries() { verbs_functions(); }

const Mlx5Functions& mlx5_functions() {
  const Loaded<Mlx5Functions>& loaded = loaded_mlx5();
  if (!loaded.report.usable) {
    fail<SystemError>(
        "GPU-driven RDMA was asked for, but libmlx5 cannot be used: {}. Install the user-space libraries of rdma-core "
        "35 or later (Debian and Ubuntu: ibverbs-providers), or set DEEP_EP_NIC_HANDLER=cpu",
        loaded.report.error);
  }
  log_once();
  return loaded.functions;
}

LibraryReport report_libraries() { return {loaded_verbs().report, loaded_mlx5().report}; }

std::vector<std::string> describe(const LibraryReport& report) {
  std::vector<std::string> lines;
  for (const LoadedLibrary* library : {&report.verbs, &report.mlx5}) {
    std::string line = library->name + ": ";
    if (!library->usable) {
      line += "not usable: " + library->error;
    } else {
      line += library->path;
      if (!library->rdma_core.empty()) line += " (rdma-core " + library->rdma_core + ")";
      if (!library->fallbacks.empty()) {
        line += fmt::format("; without {}, so a fallback is used", fmt::join(library->fallbacks, ", "));
      }
    }
    lines.push_back(std::move(line));
  }
  return lines;
}

LibraryVersion version_of_file(const std::string& path) {
  const std::string name = std::filesystem::path(path).filename().string();
  constexpr std::string_view kMark = ".so.";
  const std::size_t mark = name.find(kMark);
  if (mark == std::string::npos) return {};
  LibraryVersion result;
  result.version = name.substr(mark + kMark.size());
  // ABI.interface.release: "1.14.44.0" is the file of rdma-core 44.0.
  const std::size_t first = result.version.find('.');
  const std::size_t second = first == std::string::npos ? first : result.version.find('.', first + 1);
  if (second != std::string::npos) result.rdma_core = result.version.substr(second + 1);
  return result;
}

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
