// What the queue pairs of an opened mlx5 device share. A large job makes hundreds of them at its start, so it is asked
// for and registered once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "csrc/rdma/queue_pair_address.hpp"
#include "csrc/rdma/verbs/devx/objects.hpp"
#include "csrc/rdma/verbs/gpu_access.hpp"

namespace deep_ep::rdma::verbs {
struct Mlx5Functions;
}

namespace deep_ep::rdma::verbs::devx {

/// Of the memory of queue pairs: the page size of GPUs.
inline constexpr std::size_t kRingAlignment = 65536;

using MacAddress = std::array<std::uint8_t, 6>;

struct DevxDevice {
  /// Checks that the device writes completions as the rings need them. SystemError says which command was refused, and
  /// how.
  DevxDevice(std::shared_ptr<Device> device, const Mlx5Functions& functions,
             std::size_t page_bytes = host_page_bytes());

  /// The hardware address behind a peer's GID.
  MacAddress mac_of(const QueuePairAddress& peer);
  /// The doorbell register as kernels address it. Errors of the mapper.
  std::uint64_t* map_doorbell(const PageMapper& mapper);

  std::shared_ptr<Device> device;
  const Mlx5Functions& functions;
  std::size_t page_bytes;  ///< of this machine, which are those of every UMEM
  /// Physical ports that are bonded, where queue pairs choose between them; otherwise 0.
  std::uint8_t bonded_ports = 0;
  std::uint32_t protection_domain = 0;
  std::uint32_t event_queue = 0;
  /// Of the port's hw_counters, which the kernel gives to its own queue pairs alone: without it, losses and retries are
  /// counted nowhere. 0: not known, or the firmware has refused it.
  std::uint8_t counter_set = 0;
  std::shared_ptr<mlx5dv_devx_uar> doorbell;  ///< of all queue pairs

 private:
  std::shared_ptr<void> mapped_page_;  ///< of the register, once it is mapped
  std::map<GidBytes, MacAddress> macs_;
};

}  // namespace deep_ep::rdma::verbs::devx
