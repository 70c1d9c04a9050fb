// What the `cpu` NIC handler executes decoded work on: a device behind ibv_post_send (`verbs`), or copies between the
// mapped heaps of ranks on one host (`local`).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "csrc/rdma/ring/failure.hpp"
#include "kernels/rdma/decode.hpp"

namespace deep_ep::rdma {

using device::rdma::Operation;

struct WireCompletion {
  std::size_t ring = 0;
  std::uint64_t index = 0;             ///< of the operation; its lowest 32 bits count
  Syndrome syndrome = Syndrome::none;  ///< none: success
  std::uint8_t vendor_syndrome = 0;    ///< the device's own code (ibv_wc::vendor_err), 0 where there is none
};

/// A wire belongs to one handler, whose thread alone calls `post` and `poll`; concrete wires have functions
/// that make queue pairs known to them, before the handler starts: one for each ring of the handler, in its order.
///
/// Operations are RDMA writes and 8-byte fetch-and-adds, all valid. A write of no bytes does nothing, but
/// completes in order. Success is reported of those that are `signalled`, failure of any.
///
/// Order, as of RC queue pairs. Of one queue pair: operations take effect at the target in the order of posting (a
/// fetch-and-add is visible only after the bytes of all earlier writes), completions come in the order of posting, and
/// a completion says that all earlier operations succeeded too. More successes may be reported than were asked for.
/// Between queue pairs: no order.
///
/// Errors. The first operation of a queue pair that fails is reported with its syndrome, signalled or not. Operations
/// after it are dropped (some that were already on their way may be executed, depending on the hardware), or reported
/// as failed, too. Nothing more is posted to a queue pair whose failure was reported.
class Wire {
 public:
  static constexpr std::size_t kMostAtOnce = 64;

  virtual ~Wire() = default;

  /// Operations of a ring that may be under way: taken, and not reported, nor before one that was. So of that many a
  /// wire reports some, wanted or not.
  virtual std::size_t depth() const { return SIZE_MAX; }
  /// At most kMostAtOnce operations, with which no more are under way than may be. Local memory must stay unchanged
  /// until the operation is complete. A system error that is not a completion is an exception.
  virtual void post(std::size_t ring, std::span<const Operation> operations) = 0;

  /// Makes progress, and fills in up to completions.size() completions; returns how many. Never blocks.
  virtual std::size_t poll(std::span<WireCompletion> completions) = 0;
};

}  // namespace deep_ep::rdma
