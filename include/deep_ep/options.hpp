// Options of a Buffer, and options of every call besides its arguments.
#pragma once
// SPDX-License-Identifier: MIT

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "deep_ep/executor.hpp"
#include "deep_ep/result_tensors.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// How rows of low-latency calls cross the network: once for each rank with experts of the token; or, by rails, once
/// for each such node, to the rank with the sender's index, which stores the row on over NVLink. Results have the same
/// bits either way.
enum class LowLatencyRails : std::uint8_t {
  automatic,  ///< by rails if a model of the call says that they save more time than the additional hop takes
  always,     ///< if possible, see LowLatencyOptions::rails
  never,
};

/// How the sum of several rows of a token travels in low-latency combine, from the rank or node that has added it up in
/// fp32. A single row travels as it is. The owner's sum of these is rounded to bfloat16 once more.
enum class LowLatencySums : std::uint8_t {
  automatic,  ///< what DEEP_EP_LOW_LATENCY_SUMS says; its default is fp32
  fp32,       ///< as added
  fp24,       ///< without the lowest 8 bits: 16 significant ones, three quarters of the bytes
  bf16,       ///< the fewest bytes: 8 significant bits
};

/// Options of the low-latency calls, equal on all ranks. Without `bytes` the others have no effect.
struct LowLatencyOptions {
  /// Symmetric memory of each rank for rows of these calls, in addition to BufferOptions::heap_bytes. 0: the calls
  /// throw InvalidArgument. See Buffer::low_latency_bytes_hint. Signals take about an eighth besides. With ranks that
  /// RDMA reaches the buffer adds about half as much, from which NICs send.
  std::size_t bytes = 0;
  /// True: a rank that does not come in time, or whose process has ended, is no error. The call completes with the
  /// others, later calls leave the rank out, and all remaining ranks mask the same ones. InvalidArgument if
  /// DEEP_EP_CONTROL is off on any rank.
  bool masking = false;
  /// False: RDMA reaches every other rank, even one of the same node.
  bool allow_nvlink = true;
  /// automatic: DEEP_EP_LOW_LATENCY_RAILS decides, or the model if that is auto. Rails need nodes of equally many
  /// consecutive ranks, two or more, NVLink, and no masking (the rail of a lost rank would be lost, too). Calls with
  /// return_recv_hook never take them. Buffer::describe says why rows do not take rails.
  LowLatencyRails rails = LowLatencyRails::automatic;
  /// Format in which sums travel: how exact combine is.
  LowLatencySums sums = LowLatencySums::automatic;
  /// Queue pairs that the rows of a call take in turn to a remote rank: 1, 2 or 4. More of them use more paths of an
  /// Ethernet network. 0: DEEP_EP_LOW_LATENCY_LANES decides; its default is 1, and more on Ethernet with few remote
  /// ranks.
  int lanes = 0;
};

/// Options of normal mode between nodes. Within one node they are checked and have no effect, so a program may set them
/// before it knows the number of nodes.
struct InternodeOptions {
  /// Lanes that the rows of a call share to each rail, the rank with the same index in another node; equal on all
  /// ranks: 1, 2 or 4. A lane is a queue pair. More lanes use more paths of an Ethernet network. 0:
  /// DEEP_EP_INTERNODE_LANES decides; its default is 4 on Ethernet, else 1.
  int lanes = 0;
  /// The most lanes, equal on all ranks; 0: no bound.
  int num_qps_per_rank = 0;
  /// With several nodes this replaces BufferOptions::heap_bytes, unless it is 0, and window_bytes is then 0. Equal on
  /// all ranks.
  std::size_t heap_bytes = 0;
};

/// The options of a Buffer. All fields but timeout_s (without masking), comm_stream and result_tensors must be equal on
/// all ranks.
struct BufferOptions {
  /// Symmetric memory of each rank, equal on all ranks, for received tensors and the window. Rows that do not fit come
  /// through the window: more slowly, with the same results. See Buffer::heap_bytes_hint. Signals take memory besides.
  /// 0: low-latency calls alone; calls of normal mode and of V2 throw InvalidArgument.
  std::size_t heap_bytes = std::size_t{1} << 30;
  /// The part of the heap that is the window; equal on all ranks. 0: a quarter of the heap, at most 1 GiB.
  std::size_t window_bytes = 0;
  /// The most experts of a rank, 1 to 65536; equal on all ranks.
  int max_local_experts = 1024;
  /// Seconds that a kernel or the host waits for a peer. Unset: default_timeout_s(). 0: for ever.
  std::optional<double> timeout_s = {};
  /// The communication stream. It must outlive the buffer and all tensors and events of the buffer. nullptr: the buffer
  /// makes one of high priority.
  StreamHandle comm_stream = nullptr;
  /// The number of consecutive ranks that make a node, a divisor of R, equal on all ranks. RDMA reaches the ranks of
  /// other nodes. 0: DEEP_EP_RANKS_PER_NODE; if that is 0 too, ranks that map each other's memory are a node.
  int ranks_per_node = 0;
  /// Makes the tensors that calls return, as tensors of the program's framework, except those of allocate_tensor and of
  /// handles (but for recv_src_idx). Received rows are in the heap if there is room; otherwise, and in recorded calls,
  /// they come through the window. nullptr: received tensors are in the heap, the others in memory of the buffer, which
  /// keeps that of recorded graphs.
  std::shared_ptr<ResultTensors> result_tensors = {};
  InternodeOptions internode = {};     ///< of normal mode between nodes
  LowLatencyOptions low_latency = {};  ///< of low-latency calls, which need memory: LowLatencyOptions::bytes
};

/// How a call is ordered with the caller's work. See buffer.hpp, "Ordering".
struct CallOptions {
  StreamHandle stream = nullptr;    ///< the caller's current stream
  EventHandle previous_event = {};  ///< the call comes after this instead of the work of `stream`
  bool async_finish = false;        ///< `stream` does not wait for the call; the result has an event
  EventHandle also_after = {};      ///< the call comes after this in any case
};

}  // namespace deep_ep
