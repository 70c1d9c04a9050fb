#include "csrc/rdma/verbs/devx/objects.hpp"

#include <cerrno>
#include <utility>

#include "csrc/rdma/verbs/devx/layout.hpp"
#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs::devx {
namespace {

// Values of the user-space interface that older headers lack.
constexpr std::uint32_t kUarNcDedicated = 1U << 31;
constexpr std::uint64_t kUmemMaskDmabuf = 1;

[[noreturn]] void refuse(const Context& context, const char* name, int error, const Mailbox& answer) {
  const auto status = answer.get(layout::answer::status);
  std::string firmware;
  if (status != 0) {
    firmware =
        fmt::format("; the firmware says status {:#x}, syndrome {:#x}", status, answer.get(layout::answer::syndrome));
  }
  const char* hint = error == EPERM || error == EOPNOTSUPP ? " (DevX is refused: the driver is too old, or the process "
                                                             "may not use it)"
                                                           : "";
  fail<SystemError>("RDMA device {}: DevX {}: {}{}{}", context.device->name(), name, errno_text(error), hint, firmware);
}

/// Both the call and the firmware must succeed.
void check(const Context& context, const char* name, int error, const Mailbox& answer) {
  if (error != 0 || answer.get(layout::answer::status) != 0) refuse(context, name, error, answer);
}

/// See Umem. `dma_buf` begins where the range does. errno tells a failure.
mlx5dv_devx_umem* register_pages(const Context& context, const MemoryRange& range, int dma_buf = -1) {
  mlx5dv_devx_umem_in request{};
  request.addr = range.address;
  request.size = range.bytes;
  request.access = IBV_ACCESS_LOCAL_WRITE;
  request.pgsz_bitmap = context.page_bytes;
  if (dma_buf >= 0) {
    request.addr = nullptr;  // an offset into the dma-buf
    request.comp_mask = kUmemMaskDmabuf;
    request.dmabuf_fd = dma_buf;
  }
  errno = 0;
  return context.functions->umem_reg_ex(context.device->context(), &request);
}

}  // namespace

Mailbox Context::run(const char* name, const Mailbox& command, std::uint32_t answer_bits) const {
  Mailbox answer(answer_bits);
  const int error =
      functions->general_cmd(device->context(), command.data(), command.size(), answer.data(), answer.size());
  check(*this, name, error, answer);
  return answer;
}

FirmwareObject::FirmwareObject(Context context, const char* name, const Mailbox& command)
    : context_(std::move(context)) {
  Mailbox answer(layout::answer::short_bits);
  errno = 0;
  object_ = context_.functions->obj_create(context_.device->context(), command.data(), command.size(), answer.data(),
                                           answer.size());
  if (object_ == nullptr) refuse(context_, name, errno, answer);
  number_ = static_cast<std::uint32_t>(answer.get(layout::answer::number));
}

FirmwareObject::~FirmwareObject() {
  const int error = context_.functions->obj_destroy(object_);
  if (error != 0) {
    log::warn("RDMA device {}: DevX object {:#x} cannot be destroyed: {}", context_.device->name(), number_,
              errno_text(error));
  }
}

void FirmwareObject::modify(const char* name, const Mailbox& command) {
  Mailbox answer(layout::answer::short_bits);
  const int error =
      context_.functions->obj_modify(object_, command.data(), command.size(), answer.data(), answer.size());
  check(context_, name, error, answer);
}

Mailbox FirmwareObject::query(const char* name, const Mailbox& command, std::uint32_t answer_bits) const {
  Mailbox answer(answer_bits);
  const int error =
      context_.functions->obj_query(object_, command.data(), command.size(), answer.data(), answer.size());
  check(context_, name, error, answer);
  return answer;
}

Umem::Umem(Context context, mlx5dv_devx_umem* memory, RegistrationPath path)
    : page_bytes_(context.page_bytes),
      memory_(memory,
              [context = std::move(context)](mlx5dv_devx_umem* gone) {
                const int error = context.functions->umem_dereg(gone);
                if (error != 0) {
                  log::warn("RDMA device {}: mlx5dv_devx_umem_dereg: {}", context.device->name(), errno_text(error));
                }
              }),
      path_(path) {}

std::uint32_t Umem::id() const { return memory_->umem_id; }

Umem Umem::of_host_memory(Context context, const MemoryRange& range) {
  mlx5dv_devx_umem* memory = register_pages(context, range);
  if (memory == nullptr) {
    const int error = errno;
    fail<SystemError>("RDMA device {}: mlx5dv_devx_umem_reg_ex of {} of CPU memory at {}: {}", context.device->name(),
                      format_bytes(range.bytes), range.address, errno_text(error));
  }
  return Umem(std::move(context), memory, RegistrationPath::host);
}

Umem Umem::of_gpu_memory(Context context, const MemoryRange& range, const DmaBufExporter& exporter) {
  mlx5dv_devx_umem* memory = nullptr;
  const std::string dma_buf = by_dma_buf(range, exporter, [&](int descriptor) {
    memory = register_pages(context, range, descriptor);
    return memory != nullptr ? std::string() : "mlx5dv_devx_umem_reg_ex: " + errno_text(errno);
  });
  if (dma_buf.empty()) return Umem(std::move(context), memory, RegistrationPath::dma_buf);
  memory = register_pages(context, range);
  if (memory == nullptr) {
    const int error = errno;
    fail<SystemError>(
        "RDMA device {}: {} of GPU memory at {} cannot hold queues. Tried: dma-buf (needs Linux 6.1 or "
        "later): {}; peer memory: mlx5dv_devx_umem_reg_ex: {}",
        context.device->name(), format_bytes(range.bytes), range.address, dma_buf, errno_text(error));
  }
  return Umem(std::move(context), memory, RegistrationPath::peer_memory);
}

DoorbellPage::DoorbellPage(Context context) : context_(std::move(context)) {
  constexpr std::pair<std::uint32_t, const char*> kAttempts[] = {
      {kUarNcDedicated, "own register"},
      {MLX5DV_UAR_ALLOC_TYPE_NC, "shared register"},
      {MLX5DV_UAR_ALLOC_TYPE_BF, "write-combining register"},
  };
  std::string answers;
  for (const auto& [flags, name] : kAttempts) {
    errno = 0;
    page_ = context_.functions->alloc_uar(context_.device->context(), flags);
    if (page_ != nullptr) return;
    answers += fmt::format("{}{}: {}", answers.empty() ? "" : "; ", name, errno_text(errno));
  }
  fail<SystemError>("RDMA device {}: mlx5dv_devx_alloc_uar gives no doorbell register. Tried: {}",
                    context_.device->name(), answers);
}

DoorbellPage::~DoorbellPage() { context_.functions->free_uar(page_); }

std::uint32_t DoorbellPage::page_id() const { return page_->page_id; }
void* DoorbellPage::register_address() const { return page_->reg_addr; }

}  // namespace deep_ep::rdma::verbs::devx
