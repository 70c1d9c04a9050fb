#include "csrc/rdma/verbs/devx/objects.hpp"

#include <cerrno>
#include <stdexcept>
#include <string>
#include <utility>

#include "csrc/rdma/verbs/devx/devx_device.hpp"
#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs::devx {
namespace {

constexpr std::uint64_t kUmemMaskDmabuf = 1;  // older headers lack it

}  // namespace

Mailbox& Mailbox::set(Field field, std::uint64_t value) {
  if (field.width < 64 && value >> field.width != 0) {
    throw std::logic_error(fmt::format("{:#x} does not fit into {} bits at bit {:#x}", value, field.width, field.bit));
  }
  for (std::uint32_t i = 0; i < field.width; ++i) {
    const std::uint32_t bit = field.bit + field.width - 1 - i;
    const auto mask = static_cast<std::uint8_t>(0x80U >> bit % 8);
    std::uint8_t& byte = bytes_.at(bit / 8);
    byte = static_cast<std::uint8_t>((value >> i & 1) != 0 ? byte | mask : byte & ~mask);
  }
  return *this;
}

std::uint64_t Mailbox::get(Field field) const {
  std::uint64_t value = 0;
  for (std::uint32_t bit = field.bit; bit < field.bit + field.width; ++bit) {
    value = value << 1 | (bytes_.at(bit / 8) >> (7 - bit % 8) & 1);
  }
  return value;
}

Mailbox& Mailbox::set_bytes(std::uint32_t bit, std::span<const std::uint8_t> bytes) {
  for (const std::uint8_t byte : bytes) {
    set({bit, 8}, byte);
    bit += 8;
  }
  return *this;
}

Request::Request(const Command& what) : Mailbox(what.bits), command(what) { set(layout::command::opcode, what.opcode); }

void refuse(const Device& device, const Command& command, int error, const Mailbox& answer) {
  const auto status = answer.get(layout::answer::status);
  std::string firmware;
  if (status != 0) {
    firmware =
        fmt::format("; the firmware says status {:#x}, syndrome {:#x}", status, answer.get(layout::answer::syndrome));
  }
  const char* hint = error == EPERM || error == EOPNOTSUPP ? " (DevX is refused: the driver is too old, or the process "
                                                             "may not use it)"
                                                           : "";
  fail<SystemError>("RDMA device {}: DevX {}: {}{}{}", device.name(), command.name, errno_text(error), hint, firmware);
}

FirmwareObject::FirmwareObject(const DevxDevice& device, const Request& request) {
  Mailbox answer(request.command.answer_bits);
  errno = 0;
  mlx5dv_devx_obj* const made = device.functions.obj_create(device.device->context(), request.data(), request.size(),
                                                            answer.data(), answer.size());
  if (made == nullptr) refuse(*device.device, request.command, errno, answer);
  object = owned(device.device, made, device.functions.obj_destroy, "mlx5dv_devx_obj_destroy");
  number = static_cast<std::uint32_t>(answer.get(layout::answer::number));
}

Umem::Umem(const DevxDevice& device, const MemoryRange& range) {
  mlx5dv_devx_umem* made = nullptr;
  path = register_memory(*device.device, range, "mlx5dv_devx_umem_reg_ex", [&](int dma_buf) {
    mlx5dv_devx_umem_in request{};
    request.addr = range.address;
    request.size = range.bytes;
    request.access = IBV_ACCESS_LOCAL_WRITE;
    request.pgsz_bitmap = device.page_bytes;
    if (dma_buf >= 0) {
      request.addr = nullptr;  // an offset into the dma-buf
      request.comp_mask = kUmemMaskDmabuf;
      request.dmabuf_fd = dma_buf;
    }
    made = device.functions.umem_reg_ex(device.device->context(), &request);
    return made != nullptr;
  });
  memory = owned(device.device, made, device.functions.umem_dereg, "mlx5dv_devx_umem_dereg");
  id = made->umem_id;
}

std::shared_ptr<mlx5dv_devx_uar> make_doorbell(const DevxDevice& device) {
  constexpr std::pair<std::uint32_t, const char*> kAttempts[] = {
      {MLX5DV_UAR_ALLOC_TYPE_NC, "uncached register"},
      {MLX5DV_UAR_ALLOC_TYPE_BF, "write-combining register"},
  };
  std::string answers;
  for (const auto& [flags, name] : kAttempts) {
    errno = 0;
    mlx5dv_devx_uar* const made = device.functions.alloc_uar(device.device->context(), flags);
    if (made != nullptr) {
      return {made, [device = device.device, free = device.functions.free_uar](mlx5dv_devx_uar* gone) { free(gone); }};
    }
    answers += fmt::format("{}{}: {}", answers.empty() ? "" : "; ", name, errno_text(errno));
  }
  fail<SystemError>("RDMA device {}: mlx5dv_devx_alloc_uar gives no doorbell register. Tried: {}",
                    device.device->name(), answers);
}

}  // namespace deep_ep::rdma::verbs::devx
