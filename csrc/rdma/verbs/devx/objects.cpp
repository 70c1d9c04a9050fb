#include "csrc/rdma/verbs/devx/objects.hpp"

#include <cerrno>
#include <utility>

#include "csrc/rdma/verbs/devx/devx_device.hpp"
#include "csrc/rdma/verbs/devx/layout.hpp"
#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs::devx {
namespace {

// Values of the user-space interface that older headers lack.
constexpr std::uint32_t kUarNcDedicated = 1U << 31;
constexpr std::uint64_t kUmemMaskDmabuf = 1;

[[noreturn]] void refuse(const DevxDevice& device, const char* name, int error, const Mailbox& answer) {
  const auto status = answer.get(layout::answer::status);
  std::string firmware;
  if (status != 0) {
    firmware =
        fmt::format("; the firmware says status {:#x}, syndrome {:#x}", status, answer.get(layout::answer::syndrome));
  }
  const char* hint = error == EPERM || error == EOPNOTSUPP ? " (DevX is refused: the driver is too old, or the process "
                                                             "may not use it)"
                                                           : "";
  fail<SystemError>("RDMA device {}: DevX {}: {}{}{}", device.device->name(), name, errno_text(error), hint, firmware);
}

/// Both the call and the firmware must succeed.
template <class Thing>
Mailbox ask(const DevxDevice& device, const char* name, const Mailbox& command, std::uint32_t answer_bits, Thing* thing,
            int (*call)(Thing*, const void*, std::size_t, void*, std::size_t)) {
  Mailbox answer(answer_bits);
  const int error = call(thing, command.data(), command.size(), answer.data(), answer.size());
  if (error != 0 || answer.get(layout::answer::status) != 0) refuse(device, name, error, answer);
  return answer;
}

}  // namespace

Mailbox DevxDevice::run(const char* name, const Mailbox& command, std::uint32_t answer_bits) const {
  return ask(*this, name, command, answer_bits, device->context(), functions.general_cmd);
}

FirmwareObject::FirmwareObject(std::shared_ptr<DevxDevice> device, const char* name, const Mailbox& command)
    : device_(std::move(device)) {
  Mailbox answer(layout::answer::short_bits);
  errno = 0;
  mlx5dv_devx_obj* const made = device_->functions.obj_create(device_->device->context(), command.data(),
                                                              command.size(), answer.data(), answer.size());
  if (made == nullptr) refuse(*device_, name, errno, answer);
  object_ = owned(device_->device, made, device_->functions.obj_destroy, "mlx5dv_devx_obj_destroy");
  number_ = static_cast<std::uint32_t>(answer.get(layout::answer::number));
}

void FirmwareObject::modify(const char* name, const Mailbox& command) {
  ask(*device_, name, command, layout::answer::short_bits, object_.get(), device_->functions.obj_modify);
}

Mailbox FirmwareObject::query(const char* name, const Mailbox& command, std::uint32_t answer_bits) const {
  return ask(*device_, name, command, answer_bits, object_.get(), device_->functions.obj_query);
}

Umem::Umem(const DevxDevice& device, const MemoryRange& range) : page_bytes_(device.page_bytes) {
  mlx5dv_devx_umem* made = nullptr;
  path_ = register_memory(*device.device, range, "mlx5dv_devx_umem_reg_ex", [&](int dma_buf) {
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
  memory_ = owned(device.device, made, device.functions.umem_dereg, "mlx5dv_devx_umem_dereg");
}

std::uint32_t Umem::id() const { return memory_->umem_id; }

std::shared_ptr<mlx5dv_devx_uar> make_doorbell(const DevxDevice& device) {
  constexpr std::pair<std::uint32_t, const char*> kAttempts[] = {
      {kUarNcDedicated, "own register"},
      {MLX5DV_UAR_ALLOC_TYPE_NC, "shared register"},
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
