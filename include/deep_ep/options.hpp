// What is fixed when a Buffer is made, and what every call takes besides its arguments.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "deep_ep/executor.hpp"
#include "deep_ep/result_allocator.hpp"
#include "deep_ep/result_tensors.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// How rows of low-latency calls cross the network: once for each rank that has experts of the token; or, by rails,
/// once for each node that has, to the rank with the sender's index there, which hands the row on over NVLink. By
/// rails, combine rounds once more, for each node.
enum class LowLatencyRails : std::uint8_t {
  automatic,  ///< by rails where a model of the call says that they save more than the additional hop costs
  always,     ///< wherever possible, see LowLatencyOptions::rails
  never,
};

/// Options of the low-latency calls, equal on all ranks. Without `bytes` the others must be left as they are:
/// InvalidArgument.
struct LowLatencyOptions {
  /// Symmetric memory of each rank for them, in addition to BufferOptions::heap_bytes. 0: none, and these calls throw
  /// InvalidArgument. See Buffer::low_latency_bytes_hint. If ranks are reached by RDMA, about half as much is added,
  /// for the NICs to send from.
  std::size_t bytes = 0;
  /// A rank that does not come in time, or whose process has ended, is masked instead of being an error: the call
  /// completes with the others, and later calls leave it out. All ranks that go on mask the same ones. InvalidArgument
  /// if DEEP_EP_CONTROL is off on any rank.
  bool masking = false;
  /// False: every other rank is reached by RDMA, even one on the same node.
  bool allow_nvlink = true;
  /// automatic: DEEP_EP_LOW_LATENCY_RAILS decides, and where that is auto, the model. Rails need nodes of the same
  /// number of consecutive ranks, two or more, with NVLink in use, and no masking (the rail of a lost rank would be
  /// lost, too); Buffer::describe says why rows do not take them. Combine in FP8 and calls with return_recv_hook
  /// never take them.
  LowLatencyRails rails = LowLatencyRails::automatic;
  /// Connections that the rows of a call take in turn to a rank that is reached by RDMA: 1, 2 or 4. A network that
  /// keeps a connection on one path gets more paths so. 0: DEEP_EP_LOW_LATENCY_LANES decides, and where that is auto,
  /// 1, or more where NICs are on Ethernet and there are few such ranks.
  int lanes = 0;
};

/// Options of the normal mode between nodes. They are checked, and within one node mean nothing else: a program may set
/// them before it knows how many nodes there are. (Low-latency calls have LowLatencyOptions::lanes.)
struct InternodeOptions {
  /// Lanes that the rows of a call take in turn to each rail, the rank with the same index in another node; equal on
  /// all ranks: 1, 2 or 4. A lane is a queue pair for rows and one for credit; a network that keeps a queue pair on one
  /// path gets more paths so. 0: DEEP_EP_INTERNODE_LANES decides, which is 1 unless set.
  int lanes = 0;
  /// No more lanes than this. 0: no bound.
  int num_qps_per_rank = 0;
  /// With several nodes these take the place of BufferOptions::heap_bytes and window_bytes; equal on all ranks. 0 bytes
  /// of the heap: they do not.
  std::size_t heap_bytes = 0;
  std::size_t window_bytes = 0;  ///< see heap_bytes
};

/// The options of a Buffer. All fields but timeout_s, reject_unknown_experts, comm_stream, num_qps_per_rank,
/// result_allocator and result_tensors must be equal on all ranks.
struct BufferOptions {
  /// Symmetric memory of each rank, equal on all ranks. Received tensors live in it; what does not fit is received
  /// through a bounded window instead (slower, same results); between nodes it is OutOfMemory. See
  /// Buffer::heap_bytes_hint.
  std::size_t heap_bytes = std::size_t{1} << 30;
  /// Part of the heap set aside as the bounded window that pushed and overflowing rows land in; equal on all ranks.
  /// 0: a quarter of the heap, at most 1 GiB.
  std::size_t window_bytes = 0;
  /// Largest number of experts one rank may own, 1 to 65536; equal on all ranks.
  int max_local_experts = 1024;
  /// Seconds that a kernel or the host waits for a peer. Unset: default_timeout_s(). 0: for ever.
  std::optional<double> timeout_s = {};
  /// An entry of topk_idx beyond the last expert makes the dispatch fail on all ranks: InvalidArgument on this rank,
  /// RankMismatch on the others. False: it selects nothing, like a negative one.
  bool reject_unknown_experts = true;
  /// The communication stream, for programs that manage streams themselves: it must outlive the buffer and every tensor
  /// and event that comes from it. nullptr: the buffer makes one of high priority.
  StreamHandle comm_stream = nullptr;
  /// How many consecutive ranks make a node, equal on all ranks; it must divide their number. Ranks of other nodes are
  /// reached by RDMA. 0: DEEP_EP_RANKS_PER_NODE, and where that is 0 too, ranks that map each other's memory are a
  /// node.
  int ranks_per_node = 0;
  /// On a GPU, where memory for results comes from that need not lie in the heap: all results of low latency, and in
  /// normal mode layouts, handles, what combine returns, and rows that the heap has no room for. nullptr: the buffer's
  /// own pool, which keeps what graphs were recorded with. Calls with a previous_event always use the pool: they do not
  /// come after the work of the caller's stream.
  std::shared_ptr<ResultAllocator> result_allocator = {};
  /// Makes all tensors that calls return, except those of handles and of Buffer::allocate_tensor, as tensors of the
  /// program's framework. It makes received rows in the heap if there is room; otherwise, and in all recorded calls,
  /// rows come through the window (a recorded call's memory is the graph's, which the framework knows). nullptr:
  /// received tensors lie in the heap, the others where result_allocator says.
  std::shared_ptr<ResultTensors> result_tensors = {};
  InternodeOptions internode = {};     ///< of the normal mode between nodes
  LowLatencyOptions low_latency = {};  ///< of low-latency calls, which need memory: LowLatencyOptions::bytes
};

/// How a call is ordered with the caller's work. See buffer.hpp, "Ordering".
struct CallOptions {
  StreamHandle stream = nullptr;    ///< the caller's current stream
  EventHandle previous_event = {};  ///< the call comes after this, not after the work of `stream`
  bool async_finish = false;        ///< do not make `stream` wait for the call; the result carries an event
  /// Results lie in the library's memory.
  bool library_memory = false;
};

}  // namespace deep_ep
