// What a device reports on its own: links that go down, queue pairs and devices that fail.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "csrc/rdma/verbs/device.hpp"
#include "csrc/support/unique_fd.hpp"

namespace deep_ep::rdma::verbs {

enum class AsyncEventKind : std::uint8_t {
  queue_pair_failed,  ///< it is in the error state; `queue_pair` says which
  device_failed,      ///< nothing on the device completes any more
  port_error,         ///< the link went down: sends are retried until their timeout
  other,
};

struct AsyncEvent {
  AsyncEventKind kind = AsyncEventKind::other;
  std::uint32_t queue_pair = 0;  ///< 0 where the event is not about one
  std::string name;              ///< as libibverbs calls the event
  std::string text;              ///< for people: device, event, queue pair or port
};

/// Further events of a device, which come by a descriptor of their own.
struct EventSource {
  int descriptor = -1;               ///< readable when there is one; negative: there are none ever
  std::function<AsyncEvent()> read;  ///< the next; throws where there will be no more
};

/// Reads the events of a device on a thread of its own, logs each, and hands it on. A device's events can be read
/// only once, so an opened device has one watcher.
class AsyncEventWatcher {
 public:
  using Handler = std::function<void(const AsyncEvent&)>;

  /// `handler` runs on the watcher's thread; it must not destroy what the event is about.
  AsyncEventWatcher(std::shared_ptr<Device> device, Handler handler, EventSource further = {});
  /// Stops the thread; no handler runs afterwards.
  ~AsyncEventWatcher();
  AsyncEventWatcher(const AsyncEventWatcher&) = delete;
  AsyncEventWatcher& operator=(const AsyncEventWatcher&) = delete;

 private:
  void run() noexcept;
  AsyncEvent read_one();
  void hand_on(const AsyncEvent& event);

  std::shared_ptr<Device> device_;
  Handler handler_;
  EventSource further_;
  UniqueFd stop_;
  std::thread thread_;
};

}  // namespace deep_ep::rdma::verbs
