#include "tools/doctor/nvml.hpp"

#include <dlfcn.h>

#include <array>

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

class Nvml {
 public:
  explicit Nvml(const char* file) : library_(::dlopen(file, RTLD_NOW | RTLD_LOCAL)) {
    if (library_ == nullptr) return;
    find(init_, "nvmlInit_v2");
    find(shutdown_, "nvmlShutdown");
    find(count_, "nvmlDeviceGetCount_v2");
    find(handle_, "nvmlDeviceGetHandleByIndex_v2");
    find(name_, "nvmlDeviceGetName");
    find(memory_, "nvmlDeviceGetMemoryInfo");
    find(pci_, "nvmlDeviceGetPciInfo_v3");
    find(capability_, "nvmlDeviceGetCudaComputeCapability");
    find(link_, "nvmlDeviceGetNvLinkState");
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
    std::array<char, 96> name{};
    if (name_(device, name.data(), name.size()) == kSuccess) gpu.name = name.data();
    Memory memory{};
    if (memory_(device, &memory) == kSuccess) {
      gpu.memory_bytes = memory.total;
      gpu.free_bytes = memory.free;
    }
    PciInfo pci{};
    if (pci_(device, &pci) == kSuccess) {
      pci.bus_id[sizeof pci.bus_id - 1] = '\0';
      const auto address = topology::parse_pci_address(pci.bus_id);
      if (address) gpu.pci = address->text();
    }
    int major = 0;
    int minor = 0;
    if (capability_(device, &major, &minor) == kSuccess) gpu.capability = 10 * major + minor;
    for (unsigned link = 0; link < kMostLinks; ++link) {
      int active = 0;
      if (link_(device, link, &active) != kSuccess) continue;
      (active == 1 ? gpu.links : gpu.links_down) += 1;
    }
    return gpu;
  }

  void* library_ = nullptr;
  bool complete_ = true;
  bool started_ = false;
  int (*init_)() = nullptr;
  int (*shutdown_)() = nullptr;
  int (*count_)(unsigned*) = nullptr;
  int (*handle_)(unsigned, Device*) = nullptr;
  int (*name_)(Device, char*, unsigned) = nullptr;
  int (*memory_)(Device, Memory*) = nullptr;
  int (*pci_)(Device, PciInfo*) = nullptr;
  int (*capability_)(Device, int*, int*) = nullptr;
  int (*link_)(Device, unsigned, int*) = nullptr;
};

}  // namespace

std::optional<std::vector<LiveGpu>> ask_nvml(const char* library) {
  const Nvml nvml(library);
  if (!nvml.started()) return std::nullopt;
  return nvml.gpus();
}

}  // namespace deep_ep::tools
