// The library's front door: moves the tokens of a Mixture-of-Experts layer between ranks.
//
// Symbols: R ranks (at most 1,024), r this rank, E experts (a multiple of R; rank q owns [q*E/R, (q+1)*E/R)), T tokens
// of this rank (may differ between ranks, may be 0), K top-k (at most 32), H hidden size, N rows that this rank
// receives.
//
// Ordering. A call enqueues its kernels after `CallOptions::previous_event` if given, otherwise after all work that
// `CallOptions::stream` holds, and after the buffer's earlier calls. Later work on `CallOptions::stream` comes after
// the kernels; with `async_finish` it does so only after a wait for the returned event. Kernels run on the buffer's
// communication stream, or on `CallOptions::stream` if that gives the same order and is faster. The host waits only in
// a dispatch with exact sizes (num_worst_tokens == 0, or `exact`), because it must learn N. The host may read results
// after it has synchronised with the stream or the event.
// Between nodes, dispatch and combine need nodes of equally many consecutive ranks: InvalidArgument otherwise.
// All ranks make the same calls in the same order. One thread at a time calls a Buffer; a call of another thread throws
// Error. The tensors given to a call must stay alive and unchanged until its kernels have ended. Each launch of a CUDA
// graph makes the recorded calls again, on the stream of the launch: order launches and other calls of the buffer, by
// one stream or by events. The library does not see launches: two launches at once, or a launch beside a call, take the
// same number, and rows of one are taken for the other's. A stream is one that all threads see alike, so not
// cudaStreamPerThread (InvalidArgument). Calls leave the calling thread's current GPU as it was. A call within a call
// of the same buffer, as by a handler of signals, throws Error; the outer call goes on.
//
// SMs. `num_sms` of a call's arguments is the most SMs of its main kernel, 0 to 4096; results never depend on it. 0
// leaves the choice to the library: in normal mode 10 for dispatch and 16 for combine, in low-latency calls all, of
// which dispatch needs two. A number above the device's means all.
//
// Errors. InvalidArgument names the argument, its value and the allowed values. RankMismatch: arguments of the ranks do
// not fit together. TimeoutError: a rank does not come. The next call, or `check`, throws the error that a kernel met.
// All calls throw UseAfterDestroy after `destroy` or a move, and Error in a forked child.
//
// Ranks that end. An end says goodbye behind all that this rank has enqueued, however it happens: `destroy`, the
// destructor, or the end of the process. A peer that has everything it needs completes its call. A peer that needs a
// call which this rank has not made ends at once: its error names the rank and says "has left the buffer" or "the
// process ... has ended". With low_latency.masking the rank is masked instead. DEEP_EP_CONTROL=off: peers wait until
// their deadline.
// A call that fails on one rank before it has exchanged anything (InvalidArgument, OutOfMemory of memory that is made
// first) changes nothing: call again. Peers wait meanwhile. One that fails later, as OutOfMemory of results whose sizes
// were exchanged, ends the buffer on this rank: every later call throws, and peers that wait for the rest throw
// RankMismatch at once. Destroy the buffer on all ranks.
//
// Every wait of the host has a deadline; docs/reference/errors.md lists them.
#pragma once
// SPDX-License-Identifier: MIT

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "deep_ep/bootstrap.hpp"
#include "deep_ep/elastic.hpp"
#include "deep_ep/error.hpp"
#include "deep_ep/executor.hpp"
#include "deep_ep/load_balance.hpp"
#include "deep_ep/low_latency.hpp"
#include "deep_ep/normal_mode.hpp"
#include "deep_ep/options.hpp"
#include "deep_ep/tensor.hpp"

namespace deep_ep {

class Runtime;

/// A rank's end of the communication: see the head of this file.
class Buffer {
 public:
  /// The largest K.
  static constexpr int kMaxTopk = 32;

  /// Collective. @throws RankMismatch if options that must be equal are not, SystemError or OutOfMemory if set-up fails
  /// on some rank, TimeoutError if a rank does not come within DEEP_EP_TIMEOUT_S seconds; after 10 s the log has a
  /// warning. A callback of the program, as a bootstrap, has to end its own waits.
  /// @param bootstrap the group of ranks; used by the constructor, low_latency_resume and destroy.
  /// @param executor of make_cuda_executor or make_host_executor. Its device is the buffer's device.
  /// @param options see BufferOptions.
  Buffer(std::shared_ptr<Bootstrap> bootstrap, std::shared_ptr<Executor> executor, const BufferOptions& options = {});
  /// Says goodbye and destroys without waiting for peers; prefer `destroy`, which is collective. Waits for this rank's
  /// work, as `check` does, and at most 10 s for its RDMA operations. If the work does not end, its memory stays until
  /// the process ends.
  ~Buffer();
  /// Calls of the source throw UseAfterDestroy from now on.
  Buffer(Buffer&&) noexcept;
  /// As above; destroys the previous buffer of this object without talking to peers.
  Buffer& operator=(Buffer&&) noexcept;

  int rank() const;       ///< r
  int num_ranks() const;  ///< R
  /// P, the number of nodes. Ranks of one node map each other's memory; see BufferOptions::ranks_per_node.
  int num_nodes() const;
  /// The executor of the constructor. It lives as long as the buffer or a tensor of it.
  Executor& executor() const;
  /// BufferOptions::comm_stream, or the buffer's own; never nullptr. The buffer's own ends with it.
  StreamHandle comm_stream() const;
  /// The options of the constructor, with values of the environment filled in.
  const BufferOptions& options() const;
  /// A few lines for people to read: ranks and nodes, memory and its parts, how low-latency calls reach other ranks
  /// (NICs, rails), the numbers of SMs that calls use by default. The wording may change.
  std::string describe() const;
  /// The ranks that the control plane has found lost, ascending: until low_latency_resume. Empty without
  /// DEEP_EP_CONTROL. Any thread may ask.
  std::vector<int> lost_ranks() const;

  // ------------------------------------------------------------------------------------------------- normal mode

  /// Counts where this rank's tokens go. Not collective; no host wait.
  /// @param topk_idx [T, K] int32 or int64 contiguous; an entry that is no expert, 0 to E - 1, selects nothing.
  /// @param num_experts E, a multiple of R, at most max_local_experts a rank.
  DispatchLayout get_dispatch_layout(const ConstTensorView& topk_idx, int num_experts, const CallOptions& call = {});

  /// Collective: sends every token once to each rank that is_token_in_rank, or the handle, names. The host waits for N
  /// unless num_worst_tokens or a handle is given; such calls may be recorded into a CUDA graph.
  /// @throws OutOfMemory if neither heap nor window has room (between nodes: no room in the window for two rows to and
  /// from each node, and one of each rank). @throws InvalidArgument for exact sizes in a recording.
  DispatchResult dispatch(const DispatchArguments& arguments, const CallOptions& call = {});

  /// Collective: adds, for each token of the dispatch, the rows of its ranks. No host wait; may be recorded into a CUDA
  /// graph. @throws OutOfMemory if the window has no room for a row of each rank; between nodes for two to and from
  /// each other node, or, if x is outside the heap and has no room there, for one of each rank.
  CombineResult combine(const CombineArguments& arguments, const CallOptions& call = {});

  // ------------------------------------------------------------------------ V2's interface: see elastic.hpp

  /// Sends every token to the ranks that own its experts, or where the rows of an earlier dispatch went. A row crosses
  /// to a rank once. With a handle, or without `exact`, there is no host wait, and the call may be recorded into a CUDA
  /// graph; otherwise that is InvalidArgument. @throws OutOfMemory when the window has no room for the selections and
  /// one token's rows; between nodes as dispatch.
  ElasticDispatchResult dispatch_elastic(const ElasticDispatchArguments& arguments, const CallOptions& call = {});
  /// Adds up, for each token, the rows that the ranks of its experts hold. No host wait; may be recorded into a CUDA
  /// graph.
  /// @returns sums in fp32, rounded to bfloat16: bias_0, bias_1, then with `each_selection` the rows of all selections
  /// in their order. Without it each rank first adds its rows in the order of selections and rounds; these sums follow
  /// in the order of the ranks' last selections. The weight of a selection comes from its expert's rank; 0 for none.
  /// @throws OutOfMemory when the window has no room for one token's rows; between nodes as dispatch.
  CombineResult combine_elastic(const ElasticCombineArguments& arguments, const CallOptions& call = {});
  /// The same in two calls. The first one is collective and reads x; the second one is not, and reads topk_idx and the
  /// biases.
  ElasticReturn begin_combine_elastic(const ElasticCombineArguments& arguments, const CallOptions& call = {});
  /// The second of these calls. It comes behind all calls of this buffer so far.
  CombineResult end_combine_elastic(const ElasticReturn& back, const CallOptions& call = {});
  /// Collective: later work on the stream begins when all ranks have reached the call. No host wait. @returns an event,
  /// set with async_finish.
  EventHandle barrier(const CallOptions& call = {});

  // ------------------------------------------------------------------- replicas of experts: see load_balance.hpp

  /// Collective in a node: copies the weights of each expert into the slots that the mapping gives to its replicas, and
  /// writes nothing else. It writes a rank's slots only after that rank has reached the call in stream order, and is
  /// complete when all weights of the node have arrived. No host wait; may be recorded into a CUDA graph.
  /// @returns an event, set with async_finish. @throws InvalidArgument between nodes of unequal numbers of ranks.
  EventHandle prefetch_weights(const WeightPrefetch& weights, const CallOptions& call = {});
  /// Collective in a node: adds the gradients of each replica to those of its expert, in fp32, by ascending rank and
  /// slot, so equal inputs give equal bits. It only reads slots, after their rank has reached the call, and is complete
  /// when all ranks have read. No host wait; may be recorded into a CUDA graph.
  /// @returns an event, set with async_finish. @throws InvalidArgument as prefetch_weights.
  EventHandle reduce_grads(const GradReduction& grads, const CallOptions& call = {});

  // ------------------------------------------------------------------- low-latency mode: see low_latency.hpp

  /// Collective: sends every token to the ranks of its experts. No host wait; may be recorded into a CUDA graph.
  LowLatencyDispatchResult low_latency_dispatch(const LowLatencyDispatchArguments& arguments,
                                                const CallOptions& call = {});
  /// Collective: adds each token's weighted rows. No host wait; may be recorded into a CUDA graph.
  LowLatencyCombineResult low_latency_combine(const LowLatencyCombineArguments& arguments,
                                              const CallOptions& call = {});
  /// Collective: a barrier of the ranks that are not masked, on `stream`. No host wait. It zeroes low_latency_memory
  /// first if the program has asked for that; nothing else needs cleaning.
  void low_latency_clean(StreamHandle stream = nullptr);

  // Masks: the ranks that this rank's low-latency calls leave out, in the order of calls on `stream`. The program masks
  // ranks for this rank alone; a verdict masks a lost rank on all ranks, and only low_latency_resume ends it. No host
  // wait. InvalidArgument without LowLatencyOptions::masking.

  /// The program leaves `rank` out from now on (`masked`), or no longer.
  void low_latency_update_mask(int rank, bool masked, StreamHandle stream = nullptr);
  /// @param status [R] int32 contiguous, written: 1 where masked, else 0.
  void low_latency_query_mask(const TensorView& status, StreamHandle stream = nullptr);
  /// The program leaves no rank out any more.
  void low_latency_clear_mask(StreamHandle stream = nullptr);
  /// Collective over all ranks, masked ones too: waits for their work, agrees on the number of calls, drops receive
  /// parts that no hook has enqueued, and unmasks all ranks.
  void low_latency_resume();
  /// Collective over the ranks that live, and over one new process for each of `ranks`, which makes its Buffer over
  /// `group` with the same options meanwhile: these take the places of ranks whose processes have ended, or have left
  /// the buffer. This rank keeps object, addresses and recorded graphs; nothing of a call before may still run.
  /// Unmasks all ranks, as low_latency_resume, and drops receive parts that no hook has enqueued. Afterwards there are
  /// only low-latency calls, on all ranks: others throw Unsupported.
  /// @param group all ranks, new ones too; it takes the place of the one that the buffer was made over.
  /// @throws InvalidArgument for a rank that lives, or without LowLatencyOptions::masking; RankMismatch for a new
  /// process with other options; Unsupported for ranks of several nodes, or a heap that is not shared by posix_fd; what
  /// `group` throws if a rank does not come. Then the buffer is as before, without the ranks that were lost.
  void replace_ranks(const std::shared_ptr<Bootstrap>& group, std::span<const int> ranks);

  /// Collective: the number of nodes that a buffer of these ranks would have, with a few MiB of memory meanwhile.
  /// `ranks_per_node`: as in BufferOptions. @throws as the constructor.
  static int count_nodes(const std::shared_ptr<Bootstrap>& bootstrap, const std::shared_ptr<Executor>& executor,
                         int ranks_per_node = 0);

  // ------------------------------------------------------------------------------------------------------ memory

  /// Bytes for BufferOptions::heap_bytes with which one dispatch and its combine run without windows. Both hints
  /// throw InvalidArgument for numbers that are too small, or so large that a sum would wrap. @param num_ranks R.
  /// @param tokens the most of any rank, each of which may go to every rank. @param row_bytes bytes of a row of x.
  /// @param num_topk K, 0 if no selections are sent. @param scale_bytes bytes of a row of x_scales; negative: a 4-byte
  /// scale for each 128 channels of 8-bit rows.
  static std::size_t heap_bytes_hint(int num_ranks, std::int64_t tokens, std::int64_t row_bytes, int num_topk,
                                     std::int64_t scale_bytes = -1);
  /// Bytes for LowLatencyOptions::bytes, for calls of at most `max_tokens` tokens a rank and `hidden` channels, on
  /// `num_ranks` ranks with `num_experts` experts together. Grows with each argument. @throws InvalidArgument also
  /// where that is more than 7 GiB, with the number of tokens that fits: a rank has room for the rows of each source.
  /// @param sums the buffer's LowLatencyOptions::sums; automatic reads DEEP_EP_LOW_LATENCY_SUMS.
  static std::size_t low_latency_bytes_hint(int max_tokens, std::int64_t hidden, int num_ranks, int num_experts,
                                            LowLatencySums sums = LowLatencySums::automatic);

  /// A contiguous tensor in the symmetric heap, for example for an expert's output, so that combine can pull from it.
  /// Not collective. @param dtype any. @param shape up to four sizes, 0 or more. @param stream the first user: it waits
  /// for earlier users of the memory. @throws OutOfMemory if the tensor does not fit. @throws InvalidArgument if the
  /// stream is being recorded into a CUDA graph.
  Tensor allocate_tensor(DType dtype, std::initializer_list<std::int64_t> shape, StreamHandle stream = nullptr);
  /// Whether the tensor is in the heap memory of allocate_tensor and dispatch, so that combine may pull from it.
  bool in_heap(const ConstTensorView& tensor) const;
  /// This rank's part of the symmetric heap less its signals: [bytes] uint8, window first. For diagnosis; the layout is
  /// not documented. Valid until destroy.
  TensorView local_memory() const;
  /// The memory of low-latency calls: [LowLatencyOptions::bytes, in whole lines of 128] uint8. A program may zero it
  /// while no such call is under way on any rank. From one low_latency_clean to the next it may write anything.
  TensorView low_latency_memory() const;

  /// Collective: waits for all calls so far, and gives the GPU's memory of the heap back, for an engine that sleeps.
  /// The host keeps what the heap holds, so it needs as much memory. Addresses stay: after `resume` results, handles
  /// and recorded CUDA graphs are as before. Until then only resume, check and destroy may be called, and neither a
  /// graph nor a kernel may touch the heap's tensors.
  /// @throws Unsupported with ranks that RDMA reaches. @throws OutOfMemory if the host of a rank has no room: the
  /// buffer is as before. After a TimeoutError of a rank that did not come: destroy.
  void suspend();
  /// Collective, after suspend. @throws OutOfMemory or SystemError if the GPU of a rank has no memory: the buffer is
  /// suspended still. @throws InvalidArgument if it is not suspended.
  void resume();

  // --------------------------------------------------------------------------------------------------------- end

  /// Waits for all calls so far and throws the error that a kernel met; without `wait` looks only at ended kernels.
  /// @throws TimeoutError if they, or the work before them, have not ended within two time-outs and 10 s (with masking
  /// eight time-outs and 10 s).
  void check(bool wait = true);

  /// Collective: waits for this rank's work, then for the peers, and frees. Tensors that calls returned stay valid.
  void destroy();
  /// Whether `destroy` was called, or the buffer moved from. Never throws.
  bool destroyed() const;

 private:
  std::unique_ptr<Runtime> runtime_;
};

}  // namespace deep_ep
