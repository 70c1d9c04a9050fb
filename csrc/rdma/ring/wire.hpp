// What the `cpu` NIC handler executes decoded work on: a device behind ibv_post_send (`verbs`), or copies between the
// mapped heaps of ranks on one host (`local`).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "csrc/rdma/ring/failure.hpp"
#include "kernels/rdma/decode.hpp"

namespace deep_ep::rdma {

enum class WireOperationKind : std::uint8_t {
  write,  ///< `length` bytes at local_address (local_key) to remote_address (remote_key); length 0 writes nothing, but
          ///< completes in order
  fetch_add,  ///< adds `add` to the 8-byte word at remote_address, atomically with the adds of all queue pairs;
              ///< the old value goes to local_address (8 bytes, host byte order)
};

/// One operation. Keys and addresses are those of the work-queue entry, in host byte order; what they mean is between
/// the kernel and the wire that registered the memory (a heap is registered with addresses that start at 0).
struct WireOperation {
  std::uint32_t queue_pair = 0;  ///< the number by which the wire knows it
  std::uint64_t id = 0;          ///< returned in the completion; those of a queue pair follow one another
  WireOperationKind kind = WireOperationKind::write;
  bool signalled = false;  ///< success must be reported; failure always is
  std::uint32_t length = 0;
  std::uint32_t local_key = 0;
  std::uint32_t remote_key = 0;
  std::uint64_t local_address = 0;
  std::uint64_t remote_address = 0;
  std::uint64_t add = 0;
};

struct WireCompletion {
  std::uint32_t queue_pair = 0;
  std::uint64_t id = 0;
  Syndrome syndrome = Syndrome::none;  ///< none: success
  std::uint8_t vendor_syndrome = 0;    ///< the device's own code (ibv_wc::vendor_err), 0 where there is none
};

/// A work-queue entry of mlx5 format as an operation: what the device itself does for the `gpu` handler.
struct DecodedEntry {
  std::uint32_t opcode = 0;
  WireOperation operation;
  std::string mistake;  ///< not empty: why no device would accept the entry; `operation` does nothing then
};

/// Decodes the entry that must be number `index` of this queue pair, see kernels/rdma/decode.hpp.
DecodedEntry decode_entry(const device::rdma::WorkQueueEntry& entry, std::uint64_t index, std::uint32_t queue_pair);

/// What is wrong with an entry or doorbell, in words; empty where nothing is. Of the operation, what it says counts.
std::string describe_mistake(const device::rdma::Operation& operation, std::uint64_t index);

/// A wire belongs to one handler, whose thread alone calls `post` and `poll`; concrete wires have functions
/// that make queue pairs known to them, before the handler starts.
///
/// Order, as of RC queue pairs. Of one queue pair: operations take effect at the target in the order of posting (a
/// fetch_add is visible only after the bytes of all earlier writes), completions come in the order of posting, and a
/// completion says that all earlier operations succeeded too. More successes may be reported than were asked for.
/// Between queue pairs: no order.
///
/// Errors. The first operation of a queue pair that fails is reported with its syndrome, signalled or not, and is the
/// last that this queue pair reports. Operations after it, and all that is posted to it later, are dropped (some that
/// were already on their way may be executed, depending on the hardware).
class Wire {
 public:
  virtual ~Wire() = default;

  /// For messages: "local", "verbs".
  virtual std::string_view name() const = 0;
  /// Whether a device does the work. Then the handler sleeps briefly, for a slow look would cost more than the CPU.
  virtual bool has_device() const { return false; }

  /// Takes operations from the front, as many as there is room for, and returns how many; the caller offers the rest
  /// again after polling. All are of one queue pair. Local memory must stay unchanged until the operation is complete.
  /// An unknown queue pair, or a system error that is not a completion, is an exception.
  virtual std::size_t post(std::span<const WireOperation> operations) = 0;

  /// Makes progress, and fills in up to completions.size() completions; returns how many. Never blocks.
  virtual std::size_t poll(std::span<WireCompletion> completions) = 0;
};

}  // namespace deep_ep::rdma
