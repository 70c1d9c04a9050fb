// An opened port of an RDMA device that reaches the rank's heap, and what the device says of it.
#pragma once

#include <infiniband/verbs.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "csrc/rdma/discovery/settings.hpp"
#include "csrc/rdma/queue_pair_address.hpp"
#include "csrc/rdma/verbs/registration.hpp"

namespace deep_ep::rdma::verbs {

struct VerbsFunctions;

/// A hint of Device::require().
inline constexpr const char* kNoRoute = " (no route to the peer: wrong GID index, subnet, or a link that is down)";
/// Of a call before which errno was 0: libraries may fail without a word.
inline int errno_unless(bool good) { return good ? 0 : errno != 0 ? errno : EIO; }

/// It outlives everything made on it.
class Device {
 public:
  /// Registers the heap, which is addressed from 0 then and must outlive it; `any_order`: PCIe may bring payload in any
  /// order (relaxed ordering). What is added is seen after all that was written before it, by whatever key.
  ///
  /// InvalidArgument for a name that libibverbs does not see (the text lists those it sees); SystemError when the
  /// device cannot be opened, cannot add, or the port is not active; errors of register_memory().
  /// `functions` must outlive the device.
  Device(std::string name, const PathOptions& path, const VerbsFunctions& functions, const MemoryRange& heap,
         bool any_order = false);

  const std::string& name() const { return name_; }
  const PathOptions& path() const { return path_; }  ///< of all its queue pairs
  const VerbsFunctions& functions() const { return functions_; }
  ibv_context* context() const { return context_.get(); }
  ibv_pd* protection_domain() const { return protection_domain_.get(); }
  const ibv_device_attr& limits() const { return limits_; }
  ibv_cq* idle_completions() const { return idle_completions_.get(); }  ///< of queue pairs that send nothing
  std::uint32_t local_key() const { return payload_->lkey; }            ///< of the heap, for what this rank sends
  const char* heap_path() const { return heap_path_; }                  ///< see register_memory()
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
  /// SystemError "RDMA device mlx5_0: `call`: ..." with the hint, unless `error`, an errno, is 0.
  void require(int error, const std::string& call, const char* hint = "") const;
  /// Owns `made`, an object of the device that `end` destroys. If that fails, the log names `call`.
  template <class Thing>
  std::shared_ptr<Thing> owned(Thing* made, int (*end)(Thing*), const char* call) const {
    return {made, [this, end, call](Thing* gone) { note_end(call, end(gone)); }};
  }
  std::shared_ptr<ibv_cq> make_completion_queue(std::uint32_t depth) const;

 private:
  QueuePairAddress find_address() const;
  std::shared_ptr<ibv_mr> register_heap(const MemoryRange& heap, int access);
  void note_end(const char* call, int error) const;

  std::string name_;
  PathOptions path_;
  const VerbsFunctions& functions_;
  std::shared_ptr<ibv_context> context_;
  std::shared_ptr<ibv_pd> protection_domain_;
  ibv_device_attr limits_{};
  QueuePairAddress address_;
  const char* heap_path_ = "";
  std::shared_ptr<ibv_mr> signals_, payload_;  ///< `payload_`: the same, or registered for any order
  std::shared_ptr<ibv_cq> idle_completions_;
  std::mutex events_mutex_;
  bool failed_ = false;
};

}  // namespace deep_ep::rdma::verbs
