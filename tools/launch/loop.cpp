#include "tools/launch/loop.hpp"

#include <sys/epoll.h>

#include <array>
#include <cerrno>
#include <utility>

#include "csrc/support/format.hpp"
#include "deep_ep/error.hpp"

namespace deep_ep::tools {

// epoll keeps what is ready in the order of its becoming so, and poll does not: which of two ranks ended first matters.
Loop::Loop() : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
  if (!epoll_) fail<SystemError>("launch: cannot wait for ranks: {}", errno_text(errno));
}

void Loop::update(int fd, bool is_new) {
  const Watched& watched = *watched_.at(fd);
  epoll_event event{};
  event.events = (watched.readable ? EPOLLIN : 0U) | (watched.writable ? EPOLLOUT : 0U);
  event.data.fd = fd;
  if (::epoll_ctl(epoll_.get(), is_new ? EPOLL_CTL_ADD : EPOLL_CTL_MOD, fd, &event) != 0) {
    const int error = errno;
    watched_.erase(fd);
    fail<SystemError>("launch: cannot wait for ranks: {}", errno_text(error));
  }
}

void Loop::watch(int fd, Action action) {
  auto& watched = watched_[fd];
  const bool is_new = !watched;
  if (is_new) watched = std::make_shared<Watched>();
  watched->readable = std::move(action);
  update(fd, is_new);
}

void Loop::watch_room(int fd, Action action) {
  if (!action) {
    const auto found = watched_.find(fd);
    if (found == watched_.end() || !found->second->writable) return;
    // Errors are told even of what nobody asks about.
    if (!found->second->readable) return forget(fd);
  }
  auto& watched = watched_[fd];
  const bool is_new = !watched;
  if (is_new) watched = std::make_shared<Watched>();
  watched->writable = std::move(action);
  update(fd, is_new);
}

void Loop::forget(int fd) {
  if (watched_.erase(fd) != 0) ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, nullptr);
}

void Loop::wait(int milliseconds) {
  std::array<epoll_event, 256> events;
  const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), milliseconds);
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    const auto find = [&] {
      const auto found = watched_.find(event.data.fd);
      return found == watched_.end() ? nullptr : found->second;
    };
    // An action may forget this or any other, and itself.
    const std::shared_ptr<Watched> before = find();
    if (!before) continue;
    const bool readable = (event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0;
    if (readable && before->readable) Action(before->readable)();
    if (find() != before || !before->writable) continue;
    if ((event.events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0) Action(before->writable)();
  }
}

}  // namespace deep_ep::tools
