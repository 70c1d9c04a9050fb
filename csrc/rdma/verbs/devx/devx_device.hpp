// What the queue pairs of an opened mlx5 device share. A large job makes hundreds of them at its start, so it is asked
// for and registered once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "csrc/rdma/discovery/settings.hpp"
#include "csrc/rdma/verbs/devx/objects.hpp"

namespace deep_ep::rdma::verbs::devx {

/// Of the memory of queue pairs: the page size of GPUs.
inline constexpr std::size_t kRingAlignment = 65536;

using MacAddress = std::array<std::uint8_t, 6>;

/// What queue pairs made by DevX must be told of their port, and queue pairs made by the kernel get from it.
struct PortTraits {
  /// Of the port's hw_counters: without it, losses and retries of a queue pair are counted nowhere. 0: not known.
  std::uint8_t counter_set = 0;
  /// Physical ports that are bonded, where queue pairs choose between them; otherwise 0.
  std::uint8_t bonded_ports = 0;
};

/// Never throws because the device does not answer: what is not known is left out, and logged.
PortTraits port_traits(const Context& context, const PathOptions& path);

class DevxDevice {
 public:
  /// Checks that the device can do what the rings need (completion format 1, 8-byte fetch-and-add in the order of bytes
  /// that processors have). SystemError says which command was refused, and how. The functions outlive it.
  /// `page_bytes`: of this machine.
  DevxDevice(std::shared_ptr<Device> device, const Mlx5Functions& functions,
             std::size_t page_bytes = host_page_bytes());

  const Context& context() const { return context_; }
  std::uint32_t protection_domain() const { return protection_domain_; }
  std::uint32_t event_queue() const { return event_queue_; }
  /// The hardware address behind a peer's GID. Queue pairs of one device have one path.
  MacAddress mac_of(const QueuePairAddress& peer, const PathOptions& path);

  /// Do queue pairs count with the port's counters? Not any more, once the firmware has refused one; says so.
  bool counts() const { return counts_; }
  void stop_counting(const std::string& why);

  /// Memory of queue pairs, aligned to kRingAlignment. `exporter`: for GPU memory; may be empty.
  Umem register_memory(const MemoryRange& range, bool gpu_memory, const DmaBufExporter& exporter) const;

 private:
  Context context_;
  std::uint32_t protection_domain_;
  std::uint32_t event_queue_;
  std::map<GidBytes, MacAddress> macs_;
  bool counts_ = true;
};

}  // namespace deep_ep::rdma::verbs::devx
