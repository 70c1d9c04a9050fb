// One queue pair of the verbs wire: what was posted to it and has not completed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "csrc/rdma/ring/wire.hpp"
#include "csrc/rdma/verbs/queue_pair.hpp"
#include "csrc/rdma/verbs/registration.hpp"

struct ibv_wc;

namespace deep_ep::rdma::verbs {

/// Turns operations into work requests and completions of the device into those of the wire. The device reports only
/// requests that ask for it, and frees their room only then: so besides those that the caller wants reported, some ask
/// in every quarter of the queue. After the first failure nothing more is handed to the device, and all that is under
/// way counts as flushed at once, in order: devices differ in what they report then.
class SendQueue {
 public:
  /// `serial` comes back in the upper half of work request ids.
  SendQueue(std::shared_ptr<Device> device, std::unique_ptr<QueuePair> pair, std::uint32_t serial);

  QueuePair& pair() { return *pair_; }

  /// Takes operations from the front while there is room; all are for this queue pair. Completions of a failed queue
  /// pair go to `ready` at once.
  std::size_t post(std::span<const WireOperation> operations, std::deque<WireCompletion>& ready);

  /// A completion of the device whose id has this queue's serial.
  void complete(const ibv_wc& completion, std::deque<WireCompletion>& ready);

 private:
  struct Pending {
    std::uint64_t id;
    bool report;  ///< the caller asked for a completion
  };

  void check(const WireOperation& operation) const;
  const void* inline_source(const WireOperation& operation, std::uint32_t index);
  void report(const Pending& pending, Syndrome syndrome, std::uint8_t vendor, std::deque<WireCompletion>& ready) const;
  void fail(Syndrome syndrome, std::uint8_t vendor, std::deque<WireCompletion>& ready);

  std::shared_ptr<Device> device_;
  std::unique_ptr<QueuePair> pair_;
  std::uint32_t serial_;
  std::uint32_t report_every_;
  std::deque<Pending> pending_;       ///< in the order of posting
  std::uint32_t oldest_ = 0;          ///< index of pending_.front(); indices count up and wrap at 2^32
  std::uint32_t since_reported_ = 0;  ///< operations handed over since the last one that asked for a completion
  bool failed_ = false;
  /// If the device has no inline sends, their bytes wait here: a slot for each place in the queue.
  std::vector<std::byte> bounce_;
  std::optional<Registration> bounce_registration_;
};

/// What mlx5 devices call a failed verbs completion. The argument is an ibv_wc_status.
Syndrome syndrome_of(int status);

}  // namespace deep_ep::rdma::verbs
