#include "csrc/topology/gpus.hpp"

#include <algorithm>
#include <cctype>
#include <map>

#include "csrc/support/format.hpp"
#include "csrc/support/text.hpp"
#include "deep_ep/executor.hpp"

namespace deep_ep::topology {
namespace {

constexpr std::string_view kDriverFolder = "/proc/driver/nvidia/gpus";
constexpr std::string_view kPciFolder = "/sys/bus/pci/devices";

// Value of "Key: \t value" in the driver's text.
std::string field(std::string_view text, std::string_view key) {
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    const std::string_view line = text.substr(0, end);
    const std::size_t colon = line.find(':');
    if (colon != std::string_view::npos && trim(line.substr(0, colon)) == key) {
      return std::string(trim(line.substr(colon + 1)));
    }
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  }
  return {};
}

bool is_nvidia_gpu(const SystemRoot& root, const std::string& folder) {
  // 0x03....: display controllers, 3D controllers among them.
  return root.read(folder + "/vendor") == "0x10de" && root.read(folder + "/class").value_or("").starts_with("0x03") &&
         root.link_name(folder + "/driver") == "nvidia";
}

bool begins_with_ignoring_case(std::string_view text, std::string_view beginning) {
  return text.size() >= beginning.size() &&
         std::equal(beginning.begin(), beginning.end(), text.begin(),
                    [](unsigned char a, unsigned char b) { return std::tolower(a) == std::tolower(b); });
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
  std::vector<PciAddress> usable;
  for (const std::string& name : root.list(kDriverFolder)) {
    const auto address = parse_pci_address(name);
    if (!address) continue;
    const std::string information = root.read(fmt::format("{}/{}/information", kDriverFolder, name)).value_or("");
    Gpu& gpu = found[*address];
    gpu.uuid = field(information, "GPU UUID");
    gpu.model = field(information, "Model");
    // Where sysfs is not mounted, only the driver knows the address.
    if (!gpu.pci.address) gpu.pci.address = *address;
    usable.push_back(*address);
  }
  if (usable.empty()) {
    for (const auto& [address, gpu] : found) usable.push_back(address);
  }
  std::sort(usable.begin(), usable.end());
  for (std::size_t i = 0; i < usable.size(); ++i) found[usable[i]].cuda_id = static_cast<int>(i);

  std::vector<Gpu> gpus;
  gpus.reserve(found.size());
  for (auto& [address, gpu] : found) gpus.push_back(std::move(gpu));
  return gpus;
}

std::optional<std::size_t> find_by_uuid(const std::vector<Gpu>& gpus, std::string_view uuid) {
  std::optional<std::size_t> match;
  for (std::size_t i = 0; i < gpus.size(); ++i) {
    if (!begins_with_ignoring_case(gpus[i].uuid, uuid)) continue;
    if (match) return std::nullopt;
    match = i;
  }
  return match;
}

std::optional<PciAddress> cuda_device_address(int ordinal) {
  return parse_pci_address(cuda_device_pci_address(ordinal));
}

}  // namespace deep_ep::topology
