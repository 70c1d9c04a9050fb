// Waits for many things at once, and says what happened in the order in which it happened.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "csrc/support/unique_fd.hpp"

namespace deep_ep::tools {

class Loop {
 public:
  using Action = std::function<void()>;
  /// How long to wait in one go, ms: where nothing is known to come, and where ranks' output waits to be written.
  static constexpr int kTick = 200;
  static constexpr int kBriefTick = 10;

  Loop();
  Loop(const Loop&) = delete;
  Loop& operator=(const Loop&) = delete;

  /// Calls `action` whenever `fd` can be read, is at its end or has failed. SystemError where it cannot be waited for.
  void watch(int fd, Action action);
  /// Calls `action` whenever `fd` can be written; null: no longer.
  void watch_room(int fd, Action action);
  /// Before `fd` is closed.
  void forget(int fd);

  /// Waits, at most so long, and calls the actions of all that is ready: what became ready first comes first.
  void wait(int milliseconds);

 private:
  struct Watched {
    Action readable, writable;
  };
  void update(int fd, bool is_new);

  UniqueFd epoll_;
  std::map<int, std::shared_ptr<Watched>> watched_;
};

}  // namespace deep_ep::tools
