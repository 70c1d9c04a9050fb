// What the operator set for RDMA. Which variable counts where several are set is decided by
// csrc/support/environment.hpp; here their values are read.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "csrc/support/device_list.hpp"
#include "csrc/support/environment.hpp"

namespace deep_ep::rdma {

/// What carries RDMA traffic.
enum class WireKind : std::uint8_t {
  automatic,
  local,      ///< copies between heaps on one host, by a thread of each rank
  verbs,      ///< a NIC
  simulated,  ///< a kernel on each GPU that plays the NIC, on one host
};
std::string_view name_of(WireKind kind);

/// How the wire `simulated` behaves.
struct SimulatedNic {
  double gb_per_s = -1;      ///< 0: as fast as it goes. Below: not said, so 50 on GPUs, 0 on the CPU
  double latency_us = -1;    ///< until a peer sees a message. Below 0: not said, so 3 on GPUs, 0 on the CPU
  double reorder_us = 0;     ///< pieces of payload are held up for different times below this
  double completion_us = 0;  ///< completions are held up for different times below this
  double rails = 0;          ///< each of so many consecutive ranks is on a rail of its own, without a way to the others
  double slow = 0;           ///< queue pairs of this channel, counted from 1, have a path of slow_gb_per_s
  double slow_gb_per_s = 1;
  /// That a NIC takes, 1 or 2. 0: 2 on GPUs where messages are long, else 1.
  double multiprocessors = 0;

  bool operator==(const SimulatedNic&) const = default;
};

struct WireSetting {
  WireKind kind = WireKind::automatic;
  SimulatedNic nic;
};

/// "auto", "local", "verbs", or "simulated", which may be followed by ":key=value,..."; InvalidArgument says what is
/// wrong and what is allowed.
WireSetting parse_wire(std::string_view text);

/// How the NIC is told of new work; each needs less than the one before, and is slower.
enum class NicHandler : std::uint8_t {
  automatic,  ///< the first that works on all ranks that leave it open
  gpu,        ///< kernels ring the doorbell register of an mlx5 device
  doorbell,   ///< a thread of this process rings it for them
  cpu,        ///< a thread of this process posts what kernels wrote
};
std::string_view name_of(NicHandler handler);

enum class Choice : std::uint8_t { automatic, no, yes };
std::string_view name_of(Choice choice);

/// Where a queue pair leaves the machine, and how long it tries.
struct PathOptions {
  int port = 1;
  int gid_index = 0;
  std::uint16_t pkey_index = 0;  ///< InfiniBand partition
  /// Of packets with a global route, so of all on RoCE, where the DSCP is its upper six bits; no others have one.
  std::uint8_t traffic_class = 0;
  std::uint8_t service_level = 0;  ///< InfiniBand service level, RoCE priority; 0 to 15
  /// An unanswered packet is sent again after 4.096 us * 2^ack_timeout, retry_count times; then the queue pair fails
  /// with "transport retries exceeded". 0 to 31, 0 = wait for ever; 0 to 7. The defaults give up after 7.5 s; not 7
  /// times, because soft-RoCE takes that for "for ever".
  std::uint8_t ack_timeout = 18;
  std::uint8_t retry_count = 6;

  bool operator==(const PathOptions&) const = default;
};

struct RdmaSettings {
  /// Of GPUs to NICs; the default port is 1. A GPU with several entries uses them all, the first one for what one alone
  /// can do.
  std::vector<ListedDevice> mapping;
  DeviceFilter nics;
  environment::Value gid_index = {"auto", {}};
  NicHandler nic_handler = NicHandler::automatic;
  WireSetting wire;
  /// Do low-latency calls keep to rails? Automatic: where some rank does not reach the other rails of another node.
  Choice rail_only = Choice::automatic;
  /// May PCIe bring payload in any order? Automatic: in virtual machines, where NICs that use ATS are slow otherwise.
  Choice relaxed_ordering = Choice::automatic;
  bool dma_buf = true;
  bool has_traffic_class = false;     ///< a variable set path.traffic_class
  PathOptions path;                   ///< all but port and GID index, which the map chooses
  std::vector<std::string> taken;     ///< "NCCL_IB_TC=52": variables of others that are in effect
  std::vector<std::string> warnings;  ///< variables of others that are not understood, so ignored
};

/// Of DEEP_EP_DEVICE_TO_HCA_MAPPING, and of DEEP_EP_HCA_LIST and those that stand for it: names are whole, or, in
/// NCCL_IB_HCA, beginnings.
std::vector<ListedDevice> parse_mapping(const environment::Value& value);
DeviceFilter parse_nics(const environment::Value& value);

/// InvalidArgument names a variable of the library's own that is wrong.
RdmaSettings read_settings(const environment::Source& source = environment::of_process);

}  // namespace deep_ep::rdma
