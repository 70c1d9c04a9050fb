// Why an RDMA operation failed, as mlx5 devices encode it in the completion entry (byte 55 of an error entry). Wires
// that are no mlx5 devices translate into the same codes, so that one table explains every failure.
#pragma once

#include <cstdint>
#include <string_view>

namespace deep_ep::rdma {

/// Codes of rdma-core's providers/mlx5/mlx5dv.h (MLX5_CQE_SYNDROME_*); `none` is ours.
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

/// What the code means and what usually causes it, for people. Any value is allowed.
std::string_view text(Syndrome syndrome);

}  // namespace deep_ep::rdma
