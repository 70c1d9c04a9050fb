// An opened port of an RDMA device with a protection domain, and what the device says of it.
#pragma once

#include <infiniband/verbs.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "csrc/rdma/discovery/settings.hpp"
#include "csrc/rdma/queue_pair_address.hpp"

namespace deep_ep::rdma::verbs {

struct VerbsFunctions;

/// Bytes of a page of this machine: 4 KiB, or 64 KiB on some machines with Arm processors.
std::size_t host_page_bytes();

/// Everything made on it (registrations, queue pairs) shares it, so it closes last.
class Device {
 public:
  /// InvalidArgument for a name that libibverbs does not see (the text lists those it sees), or an empty GID;
  /// SystemError when the device cannot be opened, cannot add, or the port is not active.
  /// `functions` must outlive the device.
  Device(std::string name, const PathOptions& path, const VerbsFunctions& functions);

  const std::string& name() const { return name_; }
  const PathOptions& path() const { return path_; }  ///< of all its queue pairs
  const VerbsFunctions& functions() const { return functions_; }
  ibv_context* context() const { return context_.get(); }
  ibv_pd* protection_domain() const { return protection_domain_.get(); }
  const ibv_device_attr& limits() const { return limits_; }
  /// Of its queue pair with this number; without one, all but the number.
  QueuePairAddress address(std::uint32_t queue_pair = 0) const {
    QueuePairAddress address = address_;
    address.queue_pair = queue_pair;
    return address;
  }
  /// SystemError when the device refuses.
  ibv_port_attr port() const;
  /// Has it reported a fatal error, after which nothing on it completes? Logs what it has reported since the last call;
  /// never waits. From any thread.
  bool has_failed();

 private:
  QueuePairAddress find_address() const;

  std::string name_;
  PathOptions path_;
  const VerbsFunctions& functions_;
  std::shared_ptr<ibv_context> context_;
  std::shared_ptr<ibv_pd> protection_domain_;
  ibv_device_attr limits_{};
  QueuePairAddress address_;
  std::mutex events_mutex_;
  bool failed_ = false;
};

/// SystemError "RDMA device mlx5_0: `call`: ..." with the hint, unless `error`, an errno, is 0.
void require(const std::string& device, int error, const std::string& call, const char* hint = "");
inline constexpr const char* kNoRoute = " (no route to the peer: wrong GID index, subnet, or a link that is down)";
/// Of a call before which errno was 0: libraries may fail without a word.
inline int errno_unless(bool good) { return good ? 0 : errno != 0 ? errno : EIO; }

/// Logs that `call`, which was to end something that the device had made, has failed. 0: it has not.
void note_end(const std::string& device, const char* call, int error);

/// Owns `made`, an object of the device that `end` destroys. It keeps the device open. Errors name `call`.
template <class Thing>
std::shared_ptr<Thing> owned(std::shared_ptr<Device> device, Thing* made, int (*end)(Thing*), const char* call) {
  return {made, [device = std::move(device), end, call](Thing* gone) { note_end(device->name(), call, end(gone)); }};
}

}  // namespace deep_ep::rdma::verbs
