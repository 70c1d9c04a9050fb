#include "tools/doctor/nvml.hpp"

#include <dlfcn.h>
#include <fmt/format.h>

#include <algorithm>

#include "csrc/topology/pci.hpp"

namespace deep_ep::tools {
namespace {

// Of nvml.h: the layouts and numbers that its documentation promises to keep.
using Device = void*;
constexpr int kSuccess = 0;
constexpr unsigned kMostLinks = 18;

struct Memory {
  unsigned long long total;
  unsigned long long free;
  unsigned long long used;
};

struct PciInfo {
  char legacy_bus_id[16];
  unsigned domain;
  unsigned bus;
  unsigned device;
  unsigned pci_device_id;
  unsigned pci_subsystem_id;
  char bus_id[32];
};

struct FabricInfo {
  unsigned version;
  unsigned char cluster[16];
  int status;
  unsigned clique;
  unsigned char state;
  unsigned health;
};
constexpr unsigned kFabricVersion = static_cast<unsigned>(sizeof(FabricInfo)) | (2U << 24);

NvLinkFabric fabric_of(const FabricInfo& info) {
  NvLinkFabric fabric;
  fabric.state = static_cast<NvLinkFabric::State>(std::min<unsigned>(info.state, 3));
  fabric.error = info.status;
  fabric.clique = info.clique;
  std::string text;
  bool any = false;
  for (std::size_t i = 0; i < sizeof info.cluster; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += fmt::format("{:02x}", info.cluster[i]);
    any = any || info.cluster[i] != 0;
  }
  if (any) fabric.cluster = text;
  return fabric;
}

class Nvml {
 public:
  explicit Nvml(const char* file) : library_(::dlopen(file, RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) return;
    find(init_, "nvmlInit_v2");
    find(shutdown_, "nvmlShutdown");
    find(count_, "nvmlDeviceGetCount_v2");
    find(handle_, "nvmlDeviceGetHandleByIndex_v2");
    find(memory_, "nvmlDeviceGetMemoryInfo");
    find(pci_, "nvmlDeviceGetPciInfo_v3");
    find(link_, "nvmlDeviceGetNvLinkState");
    // Later drivers' alone.
    fabric_ = reinterpret_cast<decltype(fabric_)>(::dlsym(library_, "nvmlDeviceGetGpuFabricInfoV"));
    started_ = complete_ && init_() == kSuccess;
  }
  Nvml(const Nvml&) = delete;
  Nvml& operator=(const Nvml&) = delete;
  ~Nvml() {
    if (started_) shutdown_();
    if (library_ != nullptr) ::dlclose(library_);
  }

  bool started() const { return started_; }

  std::vector<LiveGpu> gpus() const {
    unsigned count = 0;
    std::vector<LiveGpu> result;
    if (count_(&count) != kSuccess) return result;
    for (unsigned i = 0; i < count; ++i) {
      Device device = nullptr;
      if (handle_(i, &device) == kSuccess) result.push_back(describe(device));
    }
    return result;
  }

 private:
  template <class Function>
  void find(Function& function, const char* name) {
    function = reinterpret_cast<Function>(::dlsym(library_, name));
    complete_ = complete_ && function != nullptr;
  }

  LiveGpu describe(Device device) const {
    LiveGpu gpu;
    Memory memory{};
    if (memory_(device, &memory) == kSuccess) gpu.memory_bytes = memory.total;
    PciInfo pci{};
    if (pci_(device, &pci) == kSuccess) {
      pci.bus_id[sizeof pci.bus_id - 1] = '\0';
      const auto address = topology::parse_pci_address(pci.bus_id);
      if (address) gpu.pci = address->text();
    }
    for (unsigned link = 0; link < kMostLinks; ++link) {
      int active = 0;
      if (link_(device, link, &active) == kSuccess && active == 1) ++gpu.links;
    }
    FabricInfo info{};
    info.version = kFabricVersion;
    if (fabric_ != nullptr && fabric_(device, &info) == kSuccess) gpu.fabric = fabric_of(info);
    return gpu;
  }

  void* library_ = nullptr;
  bool complete_ = true;
  bool started_ = false;
  int (*init_)() = nullptr;
  int (*shutdown_)() = nullptr;
  int (*count_)(unsigned*) = nullptr;
  int (*handle_)(unsigned, Device*) = nullptr;
  int (*memory_)(Device, Memory*) = nullptr;
  int (*pci_)(Device, PciInfo*) = nullptr;
  int (*link_)(Device, unsigned, int*) = nullptr;
  int (*fabric_)(Device, FabricInfo*) = nullptr;
};

}  // namespace

std::string NvLinkFabric::text() const { return cluster.empty() ? "" : fmt::format("{}, clique {}", cluster, clique); }

std::optional<std::vector<LiveGpu>> ask_nvml(const char* library) {
  const Nvml nvml(library);
  if (!nvml.started()) return std::nullopt;
  return nvml.gpus();
}

}  // namespace deep_ep::tools
