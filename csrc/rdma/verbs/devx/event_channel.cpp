#include "csrc/rdma/verbs/devx/event_channel.hpp"

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "csrc/rdma/verbs/devx/layout.hpp"
#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs::devx {
namespace {

namespace event = layout::event;

/// As the kernel calls them where they are about its own queue pairs.
ibv_event_type event_type(std::uint16_t number) {
  switch (number) {
    case event::path_migration_failed:
      return IBV_EVENT_PATH_MIG_ERR;
    case event::invalid_request:
      return IBV_EVENT_QP_REQ_ERR;
    case event::access_violation:
      return IBV_EVENT_QP_ACCESS_ERR;
    default:
      return IBV_EVENT_QP_FATAL;
  }
}

}  // namespace

EventChannel::EventChannel(Context context) : context_(std::move(context)) {
  errno = 0;
  channel_ = context_.functions->create_event_channel(context_.device->context(),
                                                      static_cast<mlx5dv_devx_create_event_channel_flags>(0));
  if (channel_ == nullptr) {
    fail<SystemError>("RDMA device {}: mlx5dv_devx_create_event_channel: {}", context_.device->name(),
                      errno_text(errno));
  }
}

EventChannel::~EventChannel() { context_.functions->destroy_event_channel(channel_); }

void EventChannel::subscribe(const FirmwareObject& queue_pair) {
  std::array<std::uint16_t, 4> events{event::queue_failed, event::path_migration_failed, event::invalid_request,
                                      event::access_violation};
  const int error = context_.functions->subscribe_devx_event(channel_, queue_pair.handle(), sizeof(events),
                                                             events.data(), queue_pair.number());
  if (error != 0) {
    fail<SystemError>("RDMA device {}: mlx5dv_devx_subscribe_devx_event for queue pair {:#x}: {}",
                      context_.device->name(), queue_pair.number(), errno_text(errno));
  }
}

EventSource EventChannel::source() {
  return {channel_->fd, [this] { return read(); }};
}

AsyncEvent EventChannel::read() const {
  constexpr std::size_t kHeader = sizeof(mlx5dv_devx_async_event_hdr);
  alignas(mlx5dv_devx_async_event_hdr) std::array<std::byte, kHeader + event::entry_bytes> bytes{};
  errno = 0;
  const ssize_t count = context_.functions->get_event(
      channel_, reinterpret_cast<mlx5dv_devx_async_event_hdr*>(bytes.data()), bytes.size());
  if (count < static_cast<ssize_t>(kHeader + event::type_byte + 1)) {
    fail<SystemError>("mlx5dv_devx_get_event: {}", count < 0 ? errno_text(errno) : fmt::format("{} bytes", count));
  }
  std::uint64_t cookie = 0;
  std::memcpy(&cookie, bytes.data(), sizeof(cookie));
  AsyncEvent result;
  result.kind = AsyncEventKind::queue_pair_failed;
  result.queue_pair = static_cast<std::uint32_t>(cookie);
  result.name = context_.device->functions().event_type_str(
      event_type(static_cast<std::uint16_t>(bytes[kHeader + event::type_byte])));
  result.text =
      fmt::format("RDMA device {}: {}, queue pair {:#x}", context_.device->name(), result.name, result.queue_pair);
  return result;
}

}  // namespace deep_ep::rdma::verbs::devx
