#include "tests/topology/fake_machine.hpp"

#include <fmt/format.h>
#include <stdlib.h>
#include <unistd.h>

#include <fstream>
#include <stdexcept>

namespace deep_ep::test {
namespace fs = std::filesystem;

FakeMachine::FakeMachine() {
  // Hundreds of tiny files per machine: in memory they take a twentieth of the time.
  const fs::path memory = "/dev/shm";
  const bool in_memory = ::getenv("TMPDIR") == nullptr && ::access(memory.c_str(), W_OK | X_OK) == 0;
  std::string pattern = ((in_memory ? memory : fs::temp_directory_path()) / "deep_ep_machine_XXXXXX").string();
  if (::mkdtemp(pattern.data()) == nullptr) throw std::runtime_error("cannot make a temporary folder");
  path_ = pattern;
}

FakeMachine::~FakeMachine() {
  std::error_code error;
  fs::remove_all(path_, error);
}

void FakeMachine::write(std::string_view path, std::string_view text) const {
  fs::path place = path_ / fs::path(path).relative_path();
  // Through links, as the kernel would: /sys/class/infiniband/... leads into /sys/devices/...
  if (path.starts_with("/sys/class/infiniband/")) {
    if (const auto folder = root().resolve(fs::path(path).parent_path().string())) {
      place = path_ / fs::path(*folder).relative_path() / fs::path(path).filename();
    }
  }
  std::ofstream file(place);
  if (!file) {
    fs::create_directories(place.parent_path());
    file.open(place);
  }
  file << text << '\n';
  if (!file) throw std::runtime_error("cannot write " + place.string());
}

void FakeMachine::link(std::string_view path, std::string_view target) const {
  const fs::path place = path_ / fs::path(path).relative_path();
  fs::create_directories(place.parent_path());
  fs::create_symlink(target, place);
}

void FakeMachine::remove(std::string_view path) const { fs::remove_all(path_ / fs::path(path).relative_path()); }

std::string FakeMachine::add_pci(const std::string& parent, const std::string& address, const std::string& vendor,
                                 const std::string& device_class, const std::string& driver, int numa_node) const {
  std::string folder = parent + "/" + address;
  write(folder + "/vendor", vendor);
  write(folder + "/class", device_class);
  write(folder + "/numa_node", std::to_string(numa_node));
  fs::create_directories(path_ / ("sys/bus/pci/drivers/" + driver));
  link(folder + "/driver", "/sys/bus/pci/drivers/" + driver);
  link("/sys/bus/pci/devices/" + address, folder);
  return folder;
}

void FakeMachine::add_gpu(const std::string& parent, const std::string& address, int index, int numa_node,
                          bool known_to_driver, const std::string& model) const {
  add_pci(parent, address, "0x10de", "0x030200", "nvidia", numa_node);
  if (!known_to_driver) return;
  write("/proc/driver/nvidia/gpus/" + address + "/information",
        fmt::format("Model: \t\t {}\nIRQ:   \t\t 16\nGPU UUID: \t {}\nVideo BIOS: \t 97.00\nBus Location: \t {}\n"
                    "Device Minor: \t {}",
                    model, gpu_uuid(index), address, index));
}

void FakeMachine::add_nic(const FakeNic& nic) const {
  const std::string parent = nic.folder.empty() ? "/sys/devices/virtual" : nic.folder;
  const std::string folder = parent + "/infiniband/" + nic.name;
  link("/sys/class/infiniband/" + nic.name, folder);
  if (!nic.folder.empty()) link(folder + "/device", nic.folder);
  write(folder + "/node_type", nic.node_type);
  write(folder + "/node_desc", nic.folder.empty() ? "rxe" : "machine HCA");
  write(folder + "/fw_ver", "28.41.1000");
  write(folder + "/board_id", "MT_0000000838");
  const std::string port = folder + "/ports/1";
  write(port + "/state", nic.state);
  write(port + "/phys_state", nic.physical_state);
  write(port + "/rate", nic.rate);
  write(port + "/link_layer", nic.link_layer);
  for (const char* counter : {"port_xmit_data", "port_rcv_data", "port_rcv_packets"}) {
    write(fmt::format("{}/counters/{}", port, counter), "1000");
  }
  write(port + "/counters/port_xmit_discards", "0");
  write(port + "/hw_counters/out_of_sequence", "0");
  for (std::size_t i = 0; i < nic.gids.size(); ++i) {
    write(fmt::format("{}/gids/{}", port, i), nic.gids[i].gid);
    if (nic.gids[i].type.empty()) continue;
    write(fmt::format("{}/gid_attrs/types/{}", port, i), nic.gids[i].type);
    write(fmt::format("{}/gid_attrs/ndevs/{}", port, i), nic.netdev);
  }
  if (nic.uverbs.empty()) return;
  write("/sys/class/infiniband_verbs/" + nic.uverbs + "/ibdev", nic.name);
  if (nic.device_file) write("/dev/infiniband/" + nic.uverbs, "");
}

std::vector<FakeGid> roce_gids(const std::string& address) {
  const std::string local = "fe80:0000:0000:0000:4201:0aff:fe00:0001";
  const std::string ipv4 = "0000:0000:0000:0000:0000:ffff:" + address;
  return {{local, "IB/RoCE v1"}, {local, "RoCE v2"}, {ipv4, "IB/RoCE v1"}, {ipv4, "RoCE v2"}, {}};
}

std::string gpu_uuid(int index) { return fmt::format("GPU-{:08x}-1111-2222-3333-444444444444", 0xa0000000 + index); }

std::string switch_folder(int pair) {
  const int bus = 0x10 * (pair + 1);
  return fmt::format("/sys/devices/pci0000:{0:02x}/0000:{0:02x}:01.0/0000:{1:02x}:00.0", bus, bus + 1);
}

namespace {

void write_software(const FakeMachine& machine) {
  machine.write("/proc/sys/kernel/osrelease", "6.14.0-1021-gcp");
  machine.write("/proc/sys/kernel/hostname", "node-0");
  machine.write("/proc/sys/kernel/random/boot_id", "11111111-2222-3333-4444-555555555555");
  machine.write("/etc/os-release", "NAME=Ubuntu\nPRETTY_NAME=\"Ubuntu 24.04.3 LTS\"");
  machine.write("/sys/class/dmi/id/product_name", "Google Compute Engine");
  machine.write("/proc/mounts", "tmpfs / tmpfs rw 0 0\ntmpfs /dev/shm tmpfs rw,nosuid,size=263192576k 0 0");
  machine.write("/proc/driver/nvidia/version",
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.126.09  Release Build\nGCC version: 13");
  machine.write("/sys/module/nvidia/version", "580.126.09");
  machine.write("/sys/module/nvidia_peermem/version", "580.126.09");
  machine.write("/proc/driver/nvidia/params",
                "ResmanDebugLevel: 4294967295\nRegistryDwords: \"PeerMappingOverride=1;\"");
  for (const char* file : {"nvidiactl", "nvidia-uvm"}) machine.write(std::string("/dev/") + file, "");
  machine.write("/proc/self/status", "Name:\tdeep_ep\nUid:\t0\t0\t0\t0\nCapEff:\t000001ffffffffff");
  machine.write("/proc/self/limits",
                "Limit                     Soft Limit           Hard Limit           Units     \n"
                "Max locked memory         unlimited            unlimited            bytes     \n"
                "Max open files            1048576              1048576              files     ");
  const std::string folder = "/usr/lib/x86_64-linux-gnu";
  machine.write(folder + "/libibverbs.so.1.14.50.0",
                "IBVERBS_1.14 IBVERBS_PRIVATE_34 " + folder + "/libibverbs/lib%s-rdmav34.so");
  machine.link(folder + "/libibverbs.so.1", "libibverbs.so.1.14.50.0");
  machine.write(folder + "/libmlx5.so.1.24.50.0", "MLX5_1.24 IBVERBS_PRIVATE_34");
  machine.link(folder + "/libmlx5.so.1", "libmlx5.so.1.24.50.0");
  machine.link(folder + "/libibverbs/libmlx5-rdmav34.so", "../libmlx5.so.1.24.50.0");
}

}  // namespace

void write_healthy_machine(const FakeMachine& machine, const MachineOptions& options) {
  write_software(machine);
  for (int pair = 0; pair < options.pairs; ++pair) {
    const int bus = 0x10 * (pair + 1);
    // Below the switch's upstream port: a downstream port for every device.
    const auto port = [&](int number) {
      return fmt::format("{}/0000:{:02x}:{:02x}.0", switch_folder(pair), bus + 2, number);
    };
    const auto address = [&](int number) { return fmt::format("0000:{:02x}:00.0", bus + 3 + number); };
    for (int i = 0; i < 2; ++i) {
      const int index = 2 * pair + i;
      if (options.with_gpus) machine.add_gpu(port(i), address(i), index, pair / 2, true, options.model);
      const auto at = static_cast<std::size_t>(index);
      if (!options.with_nics || at >= options.nic_names.size()) continue;
      FakeNic nic;
      nic.name = options.nic_names[at];
      nic.folder = machine.add_pci(port(2 + i), address(2 + i), "0x15b3", "0x020000", "mlx5_core", pair / 2);
      nic.uverbs = fmt::format("uverbs{}", index);
      nic.netdev = fmt::format("eth{}", index + 1);
      nic.gids = roce_gids(fmt::format("0a00:{:02x}01", index));
      if (options.infiniband) {
        nic.link_layer = "InfiniBand";
        nic.gids = {{fmt::format("fe80:0000:0000:0000:a088:c203:00f0:{:04x}", index + 1), "IB/RoCE v1"}};
      }
      machine.add_nic(nic);
    }
  }
}

void write_h200_machine(const FakeMachine& machine) {
  write_healthy_machine(machine, {.model = "NVIDIA H200", .infiniband = true});
  machine.remove("/sys/class/dmi");
  machine.write("/etc/os-release", "PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"");
  machine.write("/proc/sys/kernel/osrelease", "6.1.0-18-amd64");
  for (int i = 0; i < 4; ++i) machine.write(fmt::format("/proc/driver/nvidia-nvswitch/devices/0000:0{}:00.0", i), "");
}

}  // namespace deep_ep::test
