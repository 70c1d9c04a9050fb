#include "csrc/topology/gpus.hpp"

#include <map>
#include <set>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"

namespace deep_ep::topology {
namespace {

constexpr std::string_view kDriverFolder = "/proc/driver/nvidia/gpus";
constexpr std::string_view kPciFolder = "/sys/bus/pci/devices";

bool is_nvidia_gpu(const SystemRoot& root, const std::string& folder) {
  // 0x03....: display controllers, 3D controllers among them.
  return root.text(folder + "/vendor") == "0x10de" && root.text(folder + "/class").starts_with("0x03") &&
         root.link_name(folder + "/driver") == "nvidia";
}

}  // namespace

std::string Gpu::text() const {
  const std::string name = cuda_id ? fmt::format("GPU {}", *cuda_id) : "a GPU of another container";
  // Without an address it is a rank that runs on the CPU (rdma::ranks_without_gpu).
  return pci.address ? fmt::format("{} ({})", name, pci.address->text()) : fmt::format("rank {}", cuda_id.value_or(0));
}

std::vector<Gpu> find_gpus(const SystemRoot& root) {
  std::map<PciAddress, Gpu> found;
  for (const std::string& name : root.list(kPciFolder)) {
    const std::string folder = fmt::format("{}/{}", kPciFolder, name);
    const auto address = parse_pci_address(name);
    if (address && is_nvidia_gpu(root, folder)) found[*address].pci = pci_location(root, folder);
  }
  std::set<PciAddress> usable;
  for (const std::string& name : root.list(kDriverFolder)) {
    const auto address = parse_pci_address(name);
    if (!address) continue;
    const std::string information = root.text(fmt::format("{}/{}/information", kDriverFolder, name));
    Gpu& gpu = found[*address];
    gpu.uuid = rest_of_line(information, "GPU UUID:");
    gpu.model = rest_of_line(information, "Model:");
    // Where sysfs is not mounted, only the driver knows the address.
    if (!gpu.pci.address) gpu.pci.address = *address;
    usable.insert(*address);
  }
  std::vector<Gpu> gpus;
  for (int next = 0; auto& [address, gpu] : found) {
    if (usable.empty() || usable.contains(address)) gpu.cuda_id = next++;
    gpus.push_back(std::move(gpu));
  }
  return gpus;
}

}  // namespace deep_ep::topology
