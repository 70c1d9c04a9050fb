#include "csrc/rdma/verbs/async_events.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <exception>
#include <utility>

#include "csrc/rdma/verbs/functions.hpp"
#include "csrc/support/format.hpp"
#include "csrc/support/logging.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::rdma::verbs {
namespace {

AsyncEvent translate(const Device& device, const ibv_async_event& raw) {
  AsyncEvent event;
  event.name = device.functions().event_type_str(raw.event_type);
  event.text = fmt::format("RDMA device {}: {}", device.name(), event.name);
  switch (raw.event_type) {
    case IBV_EVENT_QP_FATAL:
    case IBV_EVENT_QP_REQ_ERR:
    case IBV_EVENT_QP_ACCESS_ERR:
    case IBV_EVENT_PATH_MIG_ERR:
      event.kind = AsyncEventKind::queue_pair_failed;
      event.queue_pair = raw.element.qp->qp_num;
      event.text += fmt::format(", queue pair {:#x}", event.queue_pair);
      break;
    case IBV_EVENT_CQ_ERR:  // An overrun completion queue loses completions for good.
    case IBV_EVENT_DEVICE_FATAL:
      event.kind = AsyncEventKind::device_failed;
      break;
    case IBV_EVENT_PORT_ERR:
      event.kind = AsyncEventKind::port_error;
      event.text += fmt::format(", port {}", raw.element.port_num);
      break;
    default:
      break;
  }
  return event;
}

}  // namespace

AsyncEventWatcher::AsyncEventWatcher(std::shared_ptr<Device> device, Handler handler, EventSource further)
    : device_(std::move(device)),
      handler_(std::move(handler)),
      further_(std::move(further)),
      stop_(::eventfd(0, EFD_CLOEXEC)) {
  if (!stop_) fail<SystemError>("eventfd for the events of RDMA device {}: {}", device_->name(), errno_text(errno));
  thread_ = std::thread([this] { run(); });
}

AsyncEventWatcher::~AsyncEventWatcher() {
  const std::uint64_t one = 1;
  // Cannot fail: the counter is far from full, and the descriptor is ours.
  [[maybe_unused]] const ssize_t written = ::write(stop_.get(), &one, sizeof(one));
  thread_.join();
}

void AsyncEventWatcher::run() noexcept {
  try {
    std::array<pollfd, 3> waits{};
    waits[0] = {device_->context()->async_fd, POLLIN, 0};
    waits[1] = {stop_.get(), POLLIN, 0};
    waits[2] = {further_.descriptor, POLLIN, 0};  // poll leaves negative ones out
    while (true) {
      const int ready = ::poll(waits.data(), waits.size(), -1);
      if (ready < 0 && errno != EINTR) fail<SystemError>("poll: {}", errno_text(errno));
      if (ready <= 0) continue;
      if (waits[1].revents != 0) return;
      if ((waits[0].revents & POLLIN) != 0) {
        hand_on(read_one());
      } else if (waits[0].revents != 0) {
        fail<SystemError>("the event descriptor is in error (poll gives {:#x})", waits[0].revents);
      }
      if (waits[2].revents == 0) continue;
      try {
        hand_on(further_.read());
      } catch (const std::exception& error) {
        waits[2].fd = -1;
        log::error("RDMA device {}: events of its queue pairs are no longer watched: {}", device_->name(),
                   error.what());
      }
    }
  } catch (const std::exception& error) {
    log::error("RDMA device {}: its events are no longer watched: {}", device_->name(), error.what());
  }
}

AsyncEvent AsyncEventWatcher::read_one() {
  ibv_async_event raw{};
  errno = 0;
  if (device_->functions().get_async_event(device_->context(), &raw) != 0) {
    fail<SystemError>("ibv_get_async_event: {}", errno_text(errno));
  }
  AsyncEvent event = translate(*device_, raw);
  // Before anything else: destroying a queue pair waits for its events to be acknowledged.
  device_->functions().ack_async_event(&raw);
  return event;
}

void AsyncEventWatcher::hand_on(const AsyncEvent& event) {
  log::at(event.kind != AsyncEventKind::other ? log::Level::warn : log::Level::info, "{}", event.text);
  if (handler_) handler_(event);
}

}  // namespace deep_ep::rdma::verbs
