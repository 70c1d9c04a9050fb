// What DevX makes on an mlx5 device, each with its destructor: firmware objects, registered memory, doorbell pages; and
// the commands that do it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "csrc/rdma/verbs/device.hpp"
#include "csrc/rdma/verbs/devx/layout.hpp"
#include "csrc/rdma/verbs/registration.hpp"

struct mlx5dv_devx_obj;
struct mlx5dv_devx_uar;
struct mlx5dv_devx_umem;

namespace deep_ep::rdma::verbs::devx {

struct DevxDevice;

/// A command for the firmware, or its answer: big-endian bit fields at fixed places.
class Mailbox {
 public:
  explicit Mailbox(std::uint32_t bits) : bytes_(bits / 8) {}

  /// std::logic_error for a value that does not fit, or a field that lies outside.
  Mailbox& set(Field field, std::uint64_t value);
  std::uint64_t get(Field field) const;
  /// Whole bytes, for GIDs and hardware addresses.
  Mailbox& set_bytes(std::uint32_t bit, std::span<const std::uint8_t> bytes);

  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  std::size_t size() const { return bytes_.size(); }

 private:
  std::vector<std::uint8_t> bytes_;
};

/// A mailbox that begins with its command.
struct Request : Mailbox {
  explicit Request(const Command& what);
  const Command& command;
};

/// SystemError with device, command, errno, and the status and syndrome of the firmware's answer.
[[noreturn]] void refuse(const Device& device, const Command& command, int error, const Mailbox& answer);

/// Gives the request to `thing` by a function of libmlx5. Both the call and the firmware must succeed; else refuse().
template <class Thing>
Mailbox ask(const Device& device, Thing* thing, int (*call)(Thing*, const void*, std::size_t, void*, std::size_t),
            const Request& request) {
  Mailbox answer(request.command.answer_bits);
  const int error = call(thing, request.data(), request.size(), answer.data(), answer.size());
  if (error != 0 || answer.get(layout::answer::status) != 0) refuse(device, request.command, error, answer);
  return answer;
}

/// A completion queue or queue pair of the firmware.
struct FirmwareObject {
  /// Errors of refuse().
  FirmwareObject(const DevxDevice& device, const Request& request);

  std::shared_ptr<mlx5dv_devx_obj> object;
  std::uint32_t number = 0;
};

/// Memory that queues lie in. Errors of register_memory().
///
/// Firmware counts the place of a queue in it in 64ths of its pages, and the kernel makes these as large as length and
/// alignment allow, unless it is told which sizes may be: here that of the machine's pages alone, which every kernel
/// can make.
struct Umem {
  Umem(const DevxDevice& device, const MemoryRange& range);

  std::shared_ptr<mlx5dv_devx_umem> memory;
  std::uint32_t id = 0;
  const char* path = "";  ///< see register_memory()
};

/// A doorbell register, which all queue pairs of the opened device share: eight bytes stored at once ring it, whether
/// or not writes are combined. The first that the device provides of: one that is not cached; a BlueFlame register,
/// used as a plain one. SystemError says what each attempt answered.
std::shared_ptr<mlx5dv_devx_uar> make_doorbell(const DevxDevice& device);

}  // namespace deep_ep::rdma::verbs::devx
