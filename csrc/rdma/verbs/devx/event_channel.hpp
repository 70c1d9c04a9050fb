// What an mlx5 device reports about queue pairs made by DevX. Its ordinary events (async_events.hpp) leave these out.
#pragma once

#include "csrc/rdma/verbs/async_events.hpp"
#include "csrc/rdma/verbs/devx/objects.hpp"

struct mlx5dv_devx_event_channel;

namespace deep_ep::rdma::verbs::devx {

class EventChannel {
 public:
  /// SystemError if the kernel opens none.
  explicit EventChannel(Context context);
  ~EventChannel();
  EventChannel(const EventChannel&) = delete;
  EventChannel& operator=(const EventChannel&) = delete;

  /// From now on the queue pair's failures come by this channel. SystemError if the kernel refuses.
  void subscribe(const FirmwareObject& queue_pair);

  /// For a watcher, which must end before the channel.
  EventSource source();

 private:
  AsyncEvent read() const;

  Context context_;
  mlx5dv_devx_event_channel* channel_;
};

}  // namespace deep_ep::rdma::verbs::devx
