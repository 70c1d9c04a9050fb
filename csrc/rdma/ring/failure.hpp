// Why an RDMA operation failed, and how that is put into words.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace deep_ep {
struct FaultRecord;
}

namespace deep_ep::rdma {

/// Why an operation failed, as mlx5 devices encode it in the completion entry (byte 55 of an error entry). Wires
/// without an mlx5 device translate into the same codes, so that one table explains every failure. They are those of
/// rdma-core's providers/mlx5/mlx5dv.h (MLX5_CQE_SYNDROME_*); `none` is ours.
enum class Syndrome : std::uint8_t {
  none = 0x00,
  local_length = 0x01,
  local_queue_pair = 0x02,
  local_protection = 0x04,
  flushed = 0x05,
  memory_window_bind = 0x06,
  bad_response = 0x10,
  local_access = 0x11,
  remote_invalid_request = 0x12,
  remote_access = 0x13,
  remote_operation = 0x14,
  transport_retries_exceeded = 0x15,
  receiver_not_ready_retries_exceeded = 0x16,
  remote_aborted = 0x22,
};

/// What the code means and what usually causes it. Any value is allowed.
std::string_view text(Syndrome syndrome);

struct Failure {
  bool of_device = false;                  ///< not of one work-queue entry: only `device` and `detail` count
  int peer = -1;                           ///< rank at the other end; negative: unknown
  std::string device = {};                 ///< the NIC or wire that reported it; empty: unknown
  std::uint32_t queue_pair = 0;            ///< 0: unknown
  std::optional<std::uint64_t> index = 0;  ///< of the entry, since the queue pair was made; nothing: unknown
  std::uint32_t opcode = 0;                ///< of the entry
  Syndrome syndrome = Syndrome::none;      ///< none: no completion said so, but `detail` does
  std::uint8_t vendor_syndrome = 0;
  std::string detail = {};  ///< more about the cause; may be empty
};

/// "RDMA write", "RDMA fetch-and-add", "operation with unknown opcode 0x2a".
std::string operation_name(std::uint32_t opcode);

/// One sentence without a full stop: operation, peer, device, queue pair, entry, syndrome with its text.
std::string describe(const Failure& failure);

/// The same for a fault that a kernel put on record (FaultKind::rdma_failed) on this rank.
std::string describe_fault(int rank, const FaultRecord& fault);

}  // namespace deep_ep::rdma
