// The library's front door: moves the tokens of a Mixture-of-Experts layer between the ranks of an NVLink domain.
//
// Symbols used below: R ranks, r this rank, E experts of which rank q owns [q*E/R, (q+1)*E/R), T tokens on this rank
// (may differ between ranks, may be 0), K top-k, H hidden size, N rows this rank receives.
//
// Ordering. Every call enqueues its kernels behind `CallOptions::previous_event` if given, otherwise behind all work
// enqueued on `CallOptions::stream`, and behind the buffer's calls before it. Later work on `CallOptions::stream` comes
// after the kernels, or, with `async_finish`, the returned event stands for them. They run on the buffer's own
// communication stream, or on `CallOptions::stream` where that makes no difference but to be faster.
// The host blocks only in a non-cached `dispatch` with num_worst_tokens == 0 (it must learn N).
// dispatch and combine are for ranks of one node, which map each other's memory: InvalidArgument otherwise.
// All ranks make the same calls in the same order. One thread at a time per Buffer.
// The tensors given to a call must stay alive and unchanged until its kernels have ended. To replay a CUDA graph is to
// make the calls recorded in it, on the stream it is launched on: order it against the buffer's other calls.
//
// Errors. InvalidArgument names the argument, what came and what is allowed; RankMismatch is raised on every rank when
// their arguments do not fit together; TimeoutError when a rank does not come. Faults that a kernel meets are raised by
// the next call (or by `check`).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/config.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "deep_ep/low_latency.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// Low-latency calls between nodes: a token's row crosses the network once for each node that has experts of it, to the
/// rank with the sender's index there (the rail), which hands it on over NVLink; or once for each rank that has.
enum class LowLatencyRails {
  automatic,  ///< by rails where a model of the call says that they save more than the additional hop costs
  always,     ///< wherever possible, see BufferOptions::low_latency_rails
  never,
};

struct BufferOptions {
  /// Symmetric memory of each rank, equal on all ranks. Received tensors live in it; what does not fit is received
  /// through a bounded window instead (slower, same results). See Buffer::heap_bytes_hint.
  std::size_t heap_bytes = std::size_t{1} << 30;
  /// Part of the heap set aside as the bounded window that pushed and overflowing rows land in. 0: a quarter of the
  /// heap, at most 1 GiB.
  std::size_t window_bytes = 0;
  /// Largest number of experts one rank may own.
  int max_local_experts = 1024;
  /// How long a kernel or the host waits for a peer. Unset: DEEP_EP_TIMEOUT_S (default 100). 0: for ever.
  std::optional<double> timeout_s;
  /// An entry of topk_idx beyond the last expert is an error. False: it selects nothing, like a negative one.
  bool reject_unknown_experts = true;
  /// The communication stream, for programs that manage streams themselves: it must outlive the buffer and every tensor
  /// and event that comes from it. nullptr: the buffer makes one of high priority.
  StreamHandle comm_stream = nullptr;
  /// Symmetric memory of each rank for low-latency calls, in addition to heap_bytes; equal on all ranks. 0: none, and
  /// low-latency calls throw. See Buffer::low_latency_bytes_hint. Where ranks are reached by RDMA, memory that their
  /// NICs fetch from is added, about half as much.
  std::size_t low_latency_bytes = 0;
  /// A rank that does not come in time to a low-latency call is masked instead of being an error: the call completes
  /// with the others, and later calls leave it out. Equal on all ranks.
  bool low_latency_masking = false;
  /// False: low-latency calls reach every other rank by RDMA, those of the own node too. Equal on all ranks.
  bool allow_nvlink_for_low_latency = true;
  /// How many consecutive ranks make a node, equal on all ranks; it must divide their number. Ranks of other nodes are
  /// reached by RDMA. 0: DEEP_EP_RANKS_PER_NODE, and where that is 0 too, ranks that map each other's memory are a
  /// node.
  int ranks_per_node = 0;
  /// Equal on all ranks. automatic: DEEP_EP_LOW_LATENCY_RAILS, and where that is auto, the model. Possible where nodes
  /// are of equally many consecutive ranks, two or more, with NVLink in use; for calls that receive at once, on all
  /// ranks alike (with return_recv_hook nobody would hand rows on until a hook is called); without masking (a lost rank
  /// would take its rail along); and not for LogFMT. Combine by rails rounds once more, for each node.
  LowLatencyRails low_latency_rails = LowLatencyRails::automatic;
};

struct CallOptions {
  StreamHandle stream = nullptr;  ///< the caller's current stream
  EventHandle previous_event;     ///< wait for this instead of for `stream`
  bool async_finish = false;      ///< do not make `stream` wait; the result carries an event
  /// Low-latency calls: only send; the result carries a hook that enqueues the receive part. Not with async_finish.
  bool return_recv_hook = false;
};

/// Result of get_dispatch_layout.
struct DispatchLayout {
  Tensor num_tokens_per_rank;    ///< [R] int32: tokens with at least one expert on that rank
  Tensor num_tokens_per_expert;  ///< [E] int32: (token, k) entries that name the expert
  Tensor is_token_in_rank;       ///< [T, R] boolean
  EventHandle event;             ///< set with async_finish
};

/// What dispatch knows about where rows went. Valid for any number of cached dispatches and combines, as long as the
/// buffer lives; independent of the communication memory. Copies share the tensors.
struct DispatchHandle {
  Tensor rank_prefix_matrix;    ///< [R, R] int32: [s][d] = rows that d received from ranks 0..s (end row of source s)
  Tensor destination_row;       ///< [T, R] int32: row of token t in recv_x of rank d, -1 if not sent there
  Tensor recv_src_idx;          ///< [rows] int32: token index at its source, for each received row
  std::int64_t num_tokens = 0;  ///< T
  std::int64_t num_recv_rows = 0;  ///< N, or num_worst_tokens
  int num_experts = 0;
  int num_topk = 0;
};

struct DispatchArguments {
  /// [T, H] contiguous, any dtype with H * size a multiple of 16 bytes.
  TensorView x;
  /// [T, S] float32 or int32, any strides, S any number; travels with 8-bit rows (or any others).
  std::optional<TensorView> x_scales;

  // A call that exchanges counts needs the layout ...
  std::optional<TensorView> num_tokens_per_rank;    ///< [R] int32 contiguous
  std::optional<TensorView> is_token_in_rank;       ///< [T, R] boolean contiguous; it alone decides where rows go
  std::optional<TensorView> num_tokens_per_expert;  ///< [E] int32 contiguous
  /// [T, K] int32 or int64 / float32, contiguous, both or neither, K <= 32; -1 = no selection.
  std::optional<TensorView> topk_idx;
  std::optional<TensorView> topk_weights;
  /// Rounds the per-expert counts up (0 stays 0).
  int expert_alignment = 1;
  /// 0: exact sizes, the host waits for them. > 0: no host wait, outputs have this many rows; rows beyond N hold
  /// topk_idx -1 and are otherwise unspecified. More than N rows must fit, else the next call raises OutOfMemory.
  std::int64_t num_worst_tokens = 0;

  // ... a cached call needs only the handle of an earlier one (x has as many rows as then; no top-k).
  const DispatchHandle* handle = nullptr;

  Config config;

  void use(const DispatchLayout& layout) {
    num_tokens_per_rank = layout.num_tokens_per_rank.view();
    is_token_in_rank = layout.is_token_in_rank.view();
    num_tokens_per_expert = layout.num_tokens_per_expert.view();
  }
};

struct DispatchResult {
  Tensor recv_x;                                ///< [rows, H], by source rank, then by token index at the source
  std::optional<Tensor> recv_x_scales;          ///< [rows, S] contiguous
  std::optional<Tensor> recv_topk_idx;          ///< [rows, K]: index among this rank's experts, or -1
  std::optional<Tensor> recv_topk_weights;      ///< [rows, K] float32: 0 where the index is -1
  std::vector<int> num_recv_tokens_per_expert;  ///< [E / R], aligned; empty for worst-case and cached calls
  DispatchHandle handle;
  EventHandle event;  ///< set with async_finish
};

/// How the rows of this rank's `x` reach the owners of the tokens. Every rank chooses for its own rows; results agree
/// bitwise whatever the ranks choose.
enum class CombineMode : std::uint8_t {
  automatic,  ///< pull when x (and topk_weights) lie in the symmetric heap, push otherwise
  pull,       ///< owners read the rows over NVLink. x must be in the heap: a received tensor or one of allocate_tensor
  push,       ///< rows are sent to a window of their owner and added as they arrive
};

struct CombineArguments {
  TensorView x;                            ///< [rows of the handle, H] bfloat16 contiguous
  const DispatchHandle* handle = nullptr;  ///< of the dispatch whose rows come back
  std::optional<TensorView> topk_weights;  ///< [rows, K] float32 contiguous; summed slot by slot
  std::optional<TensorView> bias_0;        ///< [T, H] bfloat16 contiguous, added once
  std::optional<TensorView> bias_1;
  CombineMode mode = CombineMode::automatic;
  Config config;
};

struct CombineResult {
  Tensor combined_x;  ///< [T, H] bfloat16: bias_0 + bias_1 + rows in rank order, summed in fp32
  std::optional<Tensor> combined_topk_weights;  ///< [T, K] float32
  EventHandle event;                            ///< set with async_finish
};

class Buffer {
 public:
  /// Collective over the bootstrap's ranks, with equal options. The executor's device is the buffer's device.
  Buffer(std::shared_ptr<Bootstrap> bootstrap, std::shared_ptr<Executor> executor, const BufferOptions& options = {});
  /// Destroys without talking to peers; prefer `destroy`, which is collective. Waits for this rank's work, and until
  /// what it sent by RDMA has arrived (at most 10 s).
  ~Buffer();
  Buffer(Buffer&&) noexcept;
  Buffer& operator=(Buffer&&) noexcept;

  int rank() const;
  int num_ranks() const;
  Executor& executor() const;
  StreamHandle comm_stream() const;
  const BufferOptions& options() const;

  /// Counts where tokens go. topk_idx [T, K] int32 or int64 contiguous; negative entries select nothing. An entry
  /// beyond the last expert counts nowhere and makes a later call (or `check`) throw InvalidArgument. Needs no peer.
  DispatchLayout get_dispatch_layout(const TensorView& topk_idx, int num_experts, const CallOptions& call = {});

  /// Sends every token once to each rank in is_token_in_rank.
  DispatchResult dispatch(const DispatchArguments& arguments, const CallOptions& call = {});

  /// Adds up what the destination ranks hold for each token of the original dispatch.
  CombineResult combine(const CombineArguments& arguments, const CallOptions& call = {});

  // Low-latency mode: see low_latency.hpp. Needs BufferOptions::low_latency_bytes.

  /// Sends every token to the ranks of its experts. No host wait; may be recorded into a CUDA graph.
  /// InvalidArgument when two dispatches already wait for their hooks.
  LowLatencyDispatchResult low_latency_dispatch(const LowLatencyDispatchArguments& arguments,
                                                const CallOptions& call = {});
  /// Adds up what the experts made of each token. Any number of times with a handle; as dispatch otherwise.
  LowLatencyCombineResult low_latency_combine(const LowLatencyCombineArguments& arguments,
                                              const CallOptions& call = {});
  /// Memory that experts may write their output to and combine reads it from: bfloat16, shape of the handle's recv_x.
  /// One such buffer serves all calls: use it up in stream order. It grows with the largest handle.
  TensorView low_latency_combine_buffer(const LowLatencyHandle& handle);
  /// Collective: a barrier of the ranks that are not masked, on call.stream. There is nothing to clean, as signals
  /// carry epochs; programs that call this between modes or shapes may go on doing so.
  void low_latency_clean(const CallOptions& call = {});

  // Masks: this rank's opinion of who is left out. Need BufferOptions::low_latency_masking; enqueued on call.stream.
  void low_latency_update_mask(int rank, bool masked, const CallOptions& call = {});
  /// `status` [R] int32 contiguous: 1 where masked, else 0.
  void low_latency_query_mask(const TensorView& status, const CallOptions& call = {});
  void low_latency_clear_mask(const CallOptions& call = {});
  /// Collective over all ranks: waits for their work, makes them agree on how many calls there were, drops receive
  /// parts that no hook has enqueued, and unmasks everybody. So ranks that were masked take part again.
  void low_latency_resume();

  /// low_latency_bytes for calls of at most `max_tokens` tokens a rank with rows of at most `hidden` channels.
  static std::size_t low_latency_bytes_hint(int max_tokens, std::int64_t hidden, int num_ranks, int num_experts);

  /// A tensor in the symmetric heap, e.g. for an expert's output, so that combine can pull from it.
  /// Throws OutOfMemory when it does not fit. Not collective.
  Tensor allocate_tensor(DType dtype, std::initializer_list<std::int64_t> shape, const CallOptions& call = {});
  /// Does it lie where allocate_tensor and dispatch take tensors from, so that combine may pull from it?
  bool in_heap(const TensorView& tensor) const;
  /// This rank's part of the symmetric heap less its signals: [bytes] uint8, window first. For diagnosis: what calls
  /// keep there has no documented layout. Valid until destroy.
  TensorView local_memory() const;
  /// The same for the memory of low-latency calls: [low_latency_bytes] uint8. A program may fill it with zeros while no
  /// such call is under way on any rank.
  TensorView low_latency_memory() const;

  /// Waits for all calls so far and raises what their kernels met.
  void check();

  /// Collective: waits for this rank's work, then for the peers, and frees. Tensors that calls returned stay valid.
  /// A second destroy, or any call after it, throws UseAfterDestroy.
  void destroy();
  bool destroyed() const;

  /// Heap that lets one dispatch of `tokens` tokens a rank and its combine run without windows.
  static std::size_t heap_bytes_hint(int num_ranks, std::int64_t tokens, std::int64_t row_bytes, int num_topk);

 private:
  class Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace deep_ep
