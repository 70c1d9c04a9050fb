// What DevX makes on an mlx5 device, each with its destructor: firmware objects, registered memory, doorbell pages.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "csrc/rdma/verbs/device.hpp"
#include "csrc/rdma/verbs/devx/layout.hpp"
#include "csrc/rdma/verbs/registration.hpp"

struct mlx5dv_devx_obj;
struct mlx5dv_devx_uar;
struct mlx5dv_devx_umem;

namespace deep_ep::rdma::verbs::devx {

struct DevxDevice;

/// A completion queue or queue pair of the firmware. Errors are SystemError with device, command, errno, and the status
/// and syndrome of the firmware's answer.
class FirmwareObject {
 public:
  FirmwareObject(std::shared_ptr<DevxDevice> device, const char* name, const Mailbox& command);

  std::uint32_t number() const { return number_; }
  void modify(const char* name, const Mailbox& command);
  Mailbox query(const char* name, const Mailbox& command, std::uint32_t answer_bits) const;

 private:
  std::shared_ptr<DevxDevice> device_;
  std::shared_ptr<mlx5dv_devx_obj> object_;
  std::uint32_t number_ = 0;
};

/// Memory that queues lie in. Errors of register_memory().
///
/// Firmware counts the place of a queue in it in 64ths of its pages, and the kernel makes these as large as length and
/// alignment allow, unless it is told which sizes may be: here that of the machine's pages alone, which every kernel
/// can make.
class Umem {
 public:
  Umem(const DevxDevice& device, const MemoryRange& range);

  std::uint32_t id() const;
  std::size_t page_bytes() const { return page_bytes_; }
  RegistrationPath path() const { return path_; }

 private:
  std::size_t page_bytes_;
  std::shared_ptr<mlx5dv_devx_umem> memory_;
  RegistrationPath path_;
};

/// A doorbell register. Writing combined or not, eight bytes stored at once ring it. The first that the device provides
/// of: one that is not cached and exclusive (rdma-core 45 and later); one that is not cached and all queue pairs of the
/// opened device share, which 8-byte stores allow; a BlueFlame register, used as a plain one. SystemError says what
/// each attempt answered.
std::shared_ptr<mlx5dv_devx_uar> make_doorbell(const DevxDevice& device);

}  // namespace deep_ep::rdma::verbs::devx
