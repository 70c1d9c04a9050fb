// The library's front door: moves the tokens of a Mixture-of-Experts layer between ranks.
//
// Symbols used below: R ranks (at most 128), r this rank, E experts of which rank q owns [q*E/R, (q+1)*E/R), so that E
// is a multiple of R; T tokens on this rank (may differ between ranks, may be 0), K top-k (at most 32), H hidden size,
// N rows this rank receives.
//
// Ordering. Every call enqueues its kernels behind `CallOptions::previous_event` if given, otherwise behind all work
// enqueued on `CallOptions::stream`, and behind the buffer's calls before it. Later work on `CallOptions::stream` comes
// after the kernels, or, with `async_finish`, the returned event stands for them. They run on the buffer's own
// communication stream, or on `CallOptions::stream` where that gives the same order and is faster.
// The host blocks only in a `dispatch` with num_worst_tokens == 0 (it must learn N). A host program may read results
// once it has synchronised with the stream or the event.
// Between nodes, dispatch and combine need nodes of equally many consecutive ranks: InvalidArgument otherwise.
// All ranks make the same calls in the same order. One thread at a time per Buffer: a call throws Error while another
// thread is in one.
// The tensors given to a call must stay alive and unchanged until its kernels have ended. Each launch of a CUDA graph
// makes the recorded calls again, on the stream of the launch: order launches against the buffer's other calls.
//
// Errors. InvalidArgument names the argument, what came and what is allowed; RankMismatch is raised on every rank when
// their arguments do not fit together; TimeoutError when a rank does not come. Faults that a kernel meets are raised by
// the next call (or by `check`). Calls throw UseAfterDestroy after `destroy` or a move, and Error in a forked child.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/config.hpp"
#include "deep_ep/elastic.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "deep_ep/load_balance.hpp"
#include "deep_ep/low_latency.hpp"
#include "deep_ep/low_latency_stats.hpp"
#include "deep_ep/normal_mode.hpp"
#include "deep_ep/options.hpp"
#include "deep_ep/row_layout.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep {

/// A rank's end of the communication: see the head of this file.
class Buffer {
 public:
  /// The largest K.
  static constexpr int kMaxTopk = 32;

  /// Collective.
  /// @param bootstrap how the ranks find each other; used at set-up, by low_latency_resume and by destroy.
  /// @param executor where memory lives and kernels run: make_cuda_executor or make_host_executor. Its device is the
  /// buffer's device.
  /// @param options equal on all ranks where they say so. @throws RankMismatch where they are not.
  Buffer(std::shared_ptr<Bootstrap> bootstrap, std::shared_ptr<Executor> executor, const BufferOptions& options = {});
  /// Destroys without talking to peers; prefer `destroy`, which is collective. Waits for this rank's work, and until
  /// what it sent by RDMA has arrived (at most 10 s).
  ~Buffer();
  /// What was moved from throws UseAfterDestroy.
  Buffer(Buffer&&) noexcept;
  /// As above; the buffer that was here is destroyed without talking to peers.
  Buffer& operator=(Buffer&&) noexcept;

  int rank() const;       ///< r, as the bootstrap says
  int num_ranks() const;  ///< R
  /// P: the nodes of the ranks. Ranks of one node map each other's memory; see BufferOptions::ranks_per_node.
  int num_nodes() const;
  /// The one that the buffer was made with. It lives as long as the buffer or a tensor of it.
  Executor& executor() const;
  /// BufferOptions::comm_stream, or the buffer's own; never nullptr. The buffer's own ends with it.
  StreamHandle comm_stream() const;
  /// The options that the buffer was made with; what they left to the environment is filled in.
  const BufferOptions& options() const;
  /// A few lines for people to read: ranks and nodes, memory and its parts, how low-latency calls reach other ranks
  /// (NICs, rails), the numbers of SMs that calls use by default. The wording may change.
  std::string describe() const;

  // ------------------------------------------------------------------------------------------------- normal mode

  /// Counts where this rank's tokens go. Needs no peer and no host wait.
  /// @param topk_idx [T, K] int32 or int64 contiguous; negative entries select nothing. An entry beyond the last expert
  /// counts nowhere, and makes the next dispatch throw InvalidArgument, or another call or `check` that comes before
  /// it; the other ranks' dispatches throw RankMismatch, which names the rank (see
  /// BufferOptions::reject_unknown_experts).
  /// @param num_experts E, a multiple of R, at most max_local_experts a rank.
  DispatchLayout get_dispatch_layout(const ConstTensorView& topk_idx, int num_experts, const CallOptions& call = {});

  /// Sends every token once to each rank that is_token_in_rank names.
  /// @throws OutOfMemory when neither heap nor window has room (between nodes: when the window has none for two rows
  /// from and to each, and one from each rank of the node). @throws InvalidArgument when num_worst_tokens is 0 while
  /// the stream is being recorded into a CUDA graph.
  DispatchResult dispatch(const DispatchArguments& arguments, const CallOptions& call = {});

  /// Sends rows where those of an earlier dispatch went. No host wait.
  /// @throws OutOfMemory as dispatch.
  CachedDispatchResult cached_dispatch(const CachedDispatchArguments& arguments, const CallOptions& call = {});

  /// Adds up what the destination ranks hold for each token of the original dispatch. No host wait.
  /// @throws OutOfMemory when the window has no room for two rows of each rank, or, between nodes, the heap none for a
  /// copy of x that lies outside, and the window none for a row of each rank.
  CombineResult combine(const CombineArguments& arguments, const CallOptions& call = {});

  // ---------------------------------------------------------- the second interface: see elastic.hpp, row_layout.hpp

  /// Sends every token to the ranks that own its experts. A row crosses to a rank once.
  /// @throws InvalidArgument between nodes, and with `exact` while the stream is being recorded into a CUDA graph.
  /// @throws OutOfMemory when the window has no room for the selections and one token's rows.
  ElasticDispatchResult dispatch_elastic(const ElasticDispatchArguments& arguments, const CallOptions& call = {});
  /// Sends rows where those of an earlier dispatch went. No host wait; may be recorded into a CUDA graph.
  /// @throws InvalidArgument between nodes. @throws OutOfMemory as the first one.
  ElasticCachedDispatchResult dispatch_elastic(const ElasticCachedDispatchArguments& arguments,
                                               const CallOptions& call = {});
  /// Adds up, for each token, the rows that the ranks of its experts hold. No host wait; may be recorded into a CUDA
  /// graph.
  /// @returns sums of bias_0, bias_1 and then, with `each_selection`, the rows of all selections in their order;
  /// otherwise the ranks' sums in the order of their last selections, each of a rank's rows in the order of selections,
  /// and rounded. In fp32, rounded to bfloat16. The weight of a selection is what its expert's rank holds, 0 for none.
  /// @throws InvalidArgument between nodes. @throws OutOfMemory when the window has no room for one token's rows.
  CombineResult combine_elastic(const ElasticCombineArguments& arguments, const CallOptions& call = {});
  /// deep_ep::spread_rows as a call of this buffer, so that the next one, on whatever stream, comes behind it: for rows
  /// that were received with CallOptions::library_memory. Not collective.
  void spread_rows(const RowSpreading& rows, const CallOptions& call = {});
  /// Collective: work behind it begins when all ranks have reached it. No host wait. @returns an event, set with
  /// async_finish.
  /// @throws InvalidArgument between nodes.
  EventHandle barrier(const CallOptions& call = {});

  // --------------------------------------------------------------------------- replicas of experts: see
  // load_balance.hpp

  /// Collective in a node: copies the weights of each expert into the slots that the mapping gives to its replicas.
  /// Nothing else is written. No slot of a rank is written before that rank's call is reached in stream order, and the
  /// call is complete when all weights of the node have arrived. No host wait; may be recorded into a CUDA graph.
  /// @returns an event, set with async_finish.
  /// @throws InvalidArgument if there are several nodes and they do not have equally many, consecutive ranks.
  EventHandle prefetch_weights(const WeightPrefetch& weights, const CallOptions& call = {});
  /// Collective in a node: adds the gradients of each replica to those of its expert, in fp32, by ascending rank and
  /// slot, so that equal inputs give equal bits. Slots are only read, none before its rank's call is reached, and the
  /// call is complete when all ranks have read. No host wait; may be recorded into a CUDA graph.
  /// @returns an event, set with async_finish.
  /// @throws InvalidArgument as prefetch_weights.
  EventHandle reduce_grads(const GradReduction& grads, const CallOptions& call = {});

  // ------------------------------------------------------------------- low-latency mode: see low_latency.hpp

  /// Sends every token to the ranks of its experts. No host wait; may be recorded into a CUDA graph.
  LowLatencyDispatchResult low_latency_dispatch(const LowLatencyDispatchArguments& arguments,
                                                const CallOptions& call = {});
  /// Adds up what the experts made of each token. No host wait; may be recorded into a CUDA graph.
  LowLatencyCombineResult low_latency_combine(const LowLatencyCombineArguments& arguments,
                                              const CallOptions& call = {});
  /// Memory for the experts' output: bfloat16, shaped like the handle's recv_x. LowLatencyCombineArguments::x may be
  /// any tensor; this one saves an allocation. All calls share it: in stream order, combine must have read it before it
  /// is written again. It grows with the largest handle and lives as long as the buffer.
  TensorView low_latency_combine_buffer(const LowLatencyHandle& handle);
  /// Collective: a barrier of the ranks that are not masked, on `stream`; the host does not wait. Signals carry epochs,
  /// so there is nothing to clean, unless the program has asked for low_latency_memory: then this zeroes it first.
  void low_latency_clean(StreamHandle stream = nullptr);

  /// How long low-latency calls of this rank have waited for each rank: low_latency_stats.hpp. The first call switches
  /// that on and returns zeros; until then it costs nothing. From then on, each call enqueues one small kernel more,
  /// and a dispatch three (it runs as two, with one in between that listens for the others). CUDA graphs count if they
  /// were recorded after it. Comes after the work on `stream`, and the host waits for that. Not collective.
  LowLatencyStats low_latency_stats(LowLatencyStatsThen then = LowLatencyStatsThen::go_on,
                                    StreamHandle stream = nullptr);

  // Masks: which ranks this rank leaves out, in the order of calls on `stream`: those that its program has masked, and
  // those that all ranks have found lost. The program masks and unmasks for this rank alone, and undoes no verdict.
  // InvalidArgument without LowLatencyOptions::masking.

  /// The program leaves `rank` out from now on (`masked`), or does so no longer.
  void low_latency_update_mask(int rank, bool masked, StreamHandle stream = nullptr);
  /// @param status [R] int32 contiguous, written: 1 where masked, else 0.
  void low_latency_query_mask(const TensorView& status, StreamHandle stream = nullptr);
  /// The program leaves no rank out any more.
  void low_latency_clear_mask(StreamHandle stream = nullptr);
  /// Collective over all ranks: waits for their work, makes them agree on how many calls there were, drops receive
  /// parts that no hook has enqueued, and unmasks all ranks. So ranks that were masked take part again.
  void low_latency_resume();

  // ------------------------------------------------------------------------------------------------------ memory

  /// BufferOptions::heap_bytes that lets one dispatch of `tokens` tokens a rank, and its combine, run without windows.
  /// Here and below numbers that are too small, or so large that a sum would wrap, are InvalidArgument. @param
  /// num_ranks R.
  /// @param tokens the most of any rank, each of which may go to every rank. @param row_bytes of a row of x.
  /// @param num_topk K, 0 where no selections are sent.
  /// @param scale_bytes of a row of x_scales; negative: as for 8-bit rows with a 4-byte scale for each 128 channels.
  static std::size_t heap_bytes_hint(int num_ranks, std::int64_t tokens, std::int64_t row_bytes, int num_topk,
                                     std::int64_t scale_bytes = -1);
  /// BufferOptions::heap_bytes with which local_memory() of each of `num_ranks` ranks has at least `bytes` bytes, with
  /// all other options at default.
  static std::size_t heap_bytes_for(int num_ranks, std::size_t bytes);
  /// LowLatencyOptions::bytes for calls of at most `max_tokens` tokens a rank with rows of at most `hidden` channels,
  /// on `num_ranks` ranks with `num_experts` experts together. Grows with each argument.
  static std::size_t low_latency_bytes_hint(int max_tokens, std::int64_t hidden, int num_ranks, int num_experts);

  /// A tensor in the symmetric heap, e.g. for an expert's output, so that combine can pull from it. Not collective.
  /// @param dtype any. @param shape up to four sizes, 0 or more: contiguous. @param stream the stream that will use it
  /// first: it waits until earlier users of the memory are done.
  /// @throws OutOfMemory when it does not fit.
  Tensor allocate_tensor(DType dtype, std::initializer_list<std::int64_t> shape, StreamHandle stream = nullptr);
  /// Whether the tensor lies in the heap memory of allocate_tensor and dispatch, so that combine may pull from it.
  bool in_heap(const ConstTensorView& tensor) const;
  /// This rank's part of the symmetric heap less its signals: [bytes] uint8, window first. For diagnosis: what calls
  /// keep there has no documented layout. Valid until destroy.
  TensorView local_memory() const;
  /// The same for the memory of low-latency calls: [LowLatencyOptions::bytes, in whole lines of 128] uint8. A program
  /// may fill it with zeros while no such call is under way on any rank. From one low_latency_clean to the next it may
  /// write anything.
  TensorView low_latency_memory() const;

  /// Waits for all calls so far and gives the driver the memory of results that the program has dropped; the buffer
  /// keeps it otherwise, as calls then need not ask for it. Returns how many bytes that were. The heap stays. Not
  /// collective. A call that finds no memory does the same before it throws OutOfMemory.
  /// @throws InvalidArgument while calls of this buffer are being recorded into a CUDA graph.
  std::size_t trim();

  // --------------------------------------------------------------------------------------------------------- end

  /// Waits for all calls so far and raises what their kernels met; without `wait`, raises what those that have ended
  /// met.
  void check(bool wait = true);

  /// Collective: waits for this rank's work, then for the peers, and frees. Tensors that calls returned stay valid.
  void destroy();
  /// Whether `destroy` was called, or the buffer moved from. Never throws.
  bool destroyed() const;

 private:
  class Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace deep_ep
