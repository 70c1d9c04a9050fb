// What the queue pairs of an opened mlx5 device share. A large job makes hundreds of them at its start, so it is asked
// for and registered once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "csrc/rdma/discovery/settings.hpp"
#include "csrc/rdma/queue_pair_address.hpp"
#include "csrc/rdma/verbs/devx/commands.hpp"
#include "csrc/rdma/verbs/devx/objects.hpp"

namespace deep_ep::rdma::verbs::devx {

/// Of the memory of queue pairs: the page size of GPUs.
inline constexpr std::size_t kRingAlignment = 65536;

class DevxDevice {
 public:
  /// Checks that the device can do what the rings need (completion format 1, 8-byte fetch-and-add in the order of bytes
  /// that processors have). SystemError says which command was refused, and how. Errors of local_address(). The
  /// functions outlive it. `path`: of all its queue pairs. `page_bytes`: of this machine.
  DevxDevice(std::shared_ptr<Device> device, const Mlx5Functions& functions, const PathOptions& path,
             std::size_t page_bytes = host_page_bytes());

  const Context& context() const { return context_; }
  const PathOptions& path() const { return path_; }
  std::uint32_t protection_domain() const { return protection_domain_; }
  std::uint32_t event_queue() const { return event_queue_; }
  /// Of its queue pairs, all but the number.
  const QueuePairAddress& address() const { return address_; }
  /// The hardware address behind a peer's GID.
  MacAddress mac_of(const QueuePairAddress& peer);

  /// Of the port's hw_counters, which the kernel gives to its own queue pairs alone: without it, losses and retries are
  /// counted nowhere. 0: not known.
  std::uint8_t counter_set() const { return counter_set_; }
  /// The firmware has refused it; says so.
  void stop_counting(const std::string& why);
  /// Physical ports that are bonded, where queue pairs choose between them; otherwise 0.
  std::uint8_t bonded_ports() const { return bonded_ports_; }

 private:
  Context context_;
  PathOptions path_;
  std::uint8_t bonded_ports_ = 0;
  std::uint32_t protection_domain_;
  std::uint32_t event_queue_;
  QueuePairAddress address_;
  std::uint8_t counter_set_;
  std::map<GidBytes, MacAddress> macs_;
};

}  // namespace deep_ep::rdma::verbs::devx
