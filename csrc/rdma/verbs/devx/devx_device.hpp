// An opened mlx5 device that DevX makes queue pairs on, and what they share. A large job makes hundreds of them at its
// start, so that is asked for once.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "csrc/rdma/queue_pair_address.hpp"
#include "csrc/rdma/verbs/device.hpp"
#include "csrc/rdma/verbs/devx/mailbox.hpp"
#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/rdma/verbs/gpu_access.hpp"

namespace deep_ep::rdma::verbs::devx {

/// Of the memory of queue pairs: the page size of GPUs.
inline constexpr std::size_t kRingAlignment = 65536;

using MacAddress = std::array<std::uint8_t, 6>;

/// A completion queue or queue pair of the firmware, as long as it is owned.
struct FirmwareObject {
  std::shared_ptr<mlx5dv_devx_obj> object;
  std::uint32_t number = 0;
};

/// Memory that queues lie in, registered as long as it is owned.
struct Umem {
  std::shared_ptr<mlx5dv_devx_umem> memory;
  const char* path = "";  ///< see register_memory()
  const std::byte* begin = nullptr;

  /// As the firmware knows a place in it.
  std::uint64_t offset_of(const void* place) const {
    return static_cast<std::uint64_t>(static_cast<const std::byte*>(place) - begin);
  }
};

struct DevxDevice {
  /// Checks that the device writes completions as the rings need them. SystemError says which command was refused, and
  /// how.
  DevxDevice(std::shared_ptr<Device> device, const Mlx5Functions& functions,
             std::size_t page_bytes = host_page_bytes());

  /// Gives the request to `thing` by a function of libmlx5. Unless the call and the firmware both succeed, SystemError
  /// with device, command, errno, and the status and syndrome of the firmware's answer. So do create() and mac_of().
  template <class Thing>
  Mailbox ask(Thing* thing, int (*call)(Thing*, const void*, std::size_t, void*, std::size_t),
              const Request& request) const {
    Mailbox answer(request.command.answer_bits);
    const int error = call(thing, request.data(), request.size(), answer.data(), answer.size());
    if (error != 0 || answer.get(layout::answer::status) != 0) refuse(request.command, error, answer);
    return answer;
  }
  FirmwareObject create(const Request& request) const;
  /// Errors of register_memory(). Firmware counts the place of a queue in it in 64ths of its pages, and the kernel
  /// makes these as large as length and alignment allow, unless it is told which sizes may be: here that of the
  /// machine's pages alone, which every kernel can make.
  Umem add_memory(const MemoryRange& range) const;
  /// The hardware address behind a peer's GID.
  MacAddress mac_of(const QueuePairAddress& peer);
  /// The doorbell register as kernels address it. Errors of the mapper.
  std::uint64_t* map_doorbell(const PageMapper& mapper);

  std::shared_ptr<Device> device;
  const Mlx5Functions& functions;
  std::size_t page_bytes;  ///< of this machine, which are those of every Umem
  /// Physical ports that are bonded, where queue pairs choose between them; otherwise 0.
  std::uint8_t bonded_ports = 0;
  std::uint32_t protection_domain = 0;
  std::uint32_t event_queue = 0;
  /// Of the port's hw_counters, which the kernel gives to its own queue pairs alone: without it, losses and retries are
  /// counted nowhere. 0: not known, or the firmware has refused it.
  std::uint8_t counter_set = 0;
  /// Of all queue pairs: eight bytes stored at once ring it, whether or not writes are combined. The first that the
  /// device provides of: one that is not cached; a BlueFlame register, used as a plain one.
  std::shared_ptr<mlx5dv_devx_uar> doorbell;

 private:
  [[noreturn]] void refuse(const Command& command, int error, const Mailbox& answer) const;

  std::shared_ptr<void> mapped_page_;  ///< of the register, once it is mapped
  std::map<GidBytes, MacAddress> macs_;
};

}  // namespace deep_ep::rdma::verbs::devx
