// What a Buffer is made of. The calls themselves are one file each: layout.cpp, and those of intranode/ and
// low_latency/.
#pragma once

#include <array>
#include <functional>
#include <optional>
#include <string>

#include "csrc/buffer/low_latency/hook_queue.hpp"
#include "csrc/memory/arena.hpp"
#include "csrc/memory/memory_cache.hpp"
#include "csrc/memory/node_membership.hpp"
#include "csrc/memory/symmetric_heap.hpp"
#include "csrc/rdma/connections.hpp"
#include "deep_ep/buffer.hpp"
#include "kernels/intranode/params.hpp"
#include "kernels/low_latency/params.hpp"

namespace deep_ep {

struct LayoutWork;  // kernels/layout/params.hpp

class Buffer::Implementation {
 public:
  Implementation(std::shared_ptr<Bootstrap> bootstrap, std::shared_ptr<Executor> executor,
                 const BufferOptions& options);
  ~Implementation();
  Implementation(const Implementation&) = delete;

  DispatchLayout get_dispatch_layout(const TensorView& topk_idx, int num_experts, const CallOptions& call);
  DispatchResult dispatch(const DispatchArguments& arguments, const CallOptions& call);
  CombineResult combine(const CombineArguments& arguments, const CallOptions& call);

  LowLatencyDispatchResult low_latency_dispatch(const LowLatencyDispatchArguments& arguments, const CallOptions& call);
  LowLatencyCombineResult low_latency_combine(const LowLatencyCombineArguments& arguments, const CallOptions& call);
  TensorView low_latency_combine_buffer(const LowLatencyHandle& handle);
  void low_latency_clean(const CallOptions& call);
  void low_latency_update_mask(int rank, bool masked, const CallOptions& call);
  void low_latency_query_mask(const TensorView& status, const CallOptions& call);
  void low_latency_clear_mask(const CallOptions& call);
  void low_latency_resume();

  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }
  Executor& executor() const { return *executor_; }
  StreamHandle comm_stream() const { return comm_stream_; }
  const BufferOptions& options() const { return options_; }
  bool in_heap(const TensorView& tensor) const;
  TensorView local_memory() const;
  TensorView low_latency_memory() const;

  /// A tensor in the heap, for the work of `call.stream`.
  Tensor allocate_tensor(DType dtype, std::initializer_list<std::int64_t> shape, const CallOptions& call);

  void check();
  void destroy_collectively();

 private:
  struct Outputs;  // dispatch.cpp

  /// A type and a shape on this buffer's device, without memory.
  TensorView unplaced(DType dtype, std::initializer_list<std::int64_t> shape) const {
    return TensorView::contiguous(nullptr, dtype, shape, executor_->device());
  }
  /// Tensors in the heap that share one piece of memory, which lives as long as any of them. Nothing when they do not
  /// fit.
  std::optional<std::vector<Tensor>> try_heap_tensors(std::vector<TensorView> wanted);
  /// The same in the executor's pool.
  std::vector<Tensor> pool_tensors(std::vector<TensorView> wanted);
  Tensor pool_tensor(DType dtype, std::initializer_list<std::int64_t> shape);

  void lay_out_heap();
  /// Makes the heap, with `more` bytes than the options ask for.
  void make_heap(std::size_t more);
  /// Frees the memory with the buffer, or when its set-up fails.
  void* own(void* memory, void (Executor::*free)(void*) noexcept);
  IntranodeParams intranode_params() const;
  WaitContext wait_context() const;
  /// Chooses the stream that the call's kernels run on, which waits for what the call comes after and for the call
  /// before it. Also finds out whether the call is being recorded into a graph: to ask once a call is enough.
  void begin(const CallOptions& call);
  /// The caller's stream waits for the kernels, or the returned event stands for them.
  EventHandle finish(const CallOptions& call);
  /// Instead of finish for a call that fails: later ones, and settle, come after the kernels that it has enqueued.
  void abandon_call();
  /// The host waits for all calls so far.
  void settle();
  /// The outputs are used on the caller's stream too.
  void use_on(const CallOptions& call, const Tensor& tensor) const;

  /// Throws what a kernel met since the last look. Cheap when there is nothing.
  void raise_faults();
  std::string describe(const FaultRecord& fault) const;
  std::string describe_masked(const FaultRecord& record) const;
  /// True for a fault after which the ranks no longer agree on how far they got.
  static bool breaks(const FaultRecord& fault);
  /// Has a call ended early? (Notes do not count.)
  bool met_fault() const;
  /// Throws unless all ranks are of one node, as the calls of normal mode need.
  void require_one_node(const char* call) const;
  /// Makes every later call throw TimeoutError: the ranks no longer agree on how far they got.
  [[noreturn]] void break_down(const std::string& why);

  DispatchResult dispatch_rows(const DispatchArguments& arguments, const CallOptions& call);
  DispatchHandle notify(const DispatchArguments& arguments, std::vector<int>& tokens_per_expert);
  void wait_for_counts();
  Outputs allocate_outputs(const DispatchArguments& arguments, const DispatchHandle& handle);
  LaunchShape dispatch_shape(const Config& config, DispatchParams& params) const;
  LaunchShape combine_shape(const Config& config, CombineParams& params) const;
  void place_window(const DispatchArguments& arguments, DispatchParams& params) const;
  void place_window(CombineParams& params) const;

  // Low-latency calls (low_latency.cpp).
  void set_up_low_latency();
  /// Low-latency calls reach some ranks by RDMA: queue pairs, and what kernels need beside them.
  void set_up_rdma();
  /// After the last call. Its kernels have ended, but what they posted may not have reached the peers, who wait for it.
  void drain_rdma() noexcept;
  /// After all ranks have ended their work: new queue pairs, and all that was told over the old ones as it would be
  /// after `counts` calls.
  void resume_rdma(const std::array<std::uint64_t, 3>& counts);
  /// `call` needs low-latency memory.
  void require_low_latency(const char* call) const;
  void require_masking(const char* call) const;
  /// Throws what an earlier call met, and logs whom it masked.
  void look_after_low_latency();
  LowLatencyParams low_latency_params() const;
  /// Why no call of this buffer may go by rails; nullptr: some may.
  const char* why_not_by_rails() const;
  /// The same for the log.
  std::string describe_rails() const;
  /// Whether such a call goes by rails: the ranks of a node, else 0. Rows directly, and by rails, have so many bytes.
  int choose_rails(const CallOptions& call, int max_tokens, int num_topk, std::size_t row_bytes,
                   std::size_t rail_row_bytes) const;
  /// The call's `tokens` and its rows of `row_bytes` fit the window.
  void check_low_latency_room(std::int64_t max_tokens, std::int64_t hidden, std::size_t row_bytes) const;
  LowLatencyQueue& queue(LowLatencyKind kind) const { return *queues_[static_cast<std::size_t>(kind)]; }
  /// Enqueues one part, or both, of a call whose receive part may wait for a hook.
  using LowLatencyLaunch = std::function<void(LowLatencyPhase, StreamHandle)>;
  /// After begin: enqueues both parts, or the send part and sets `hook` for the other. Then it is time to finish.
  void enqueue_low_latency(LowLatencyKind kind, const CallOptions& call, LowLatencyLaunch launch,
                           std::function<void()>& hook);

  std::shared_ptr<Bootstrap> bootstrap_;
  std::shared_ptr<Executor> executor_;
  BufferOptions options_;
  int rank_;
  int num_ranks_;
  double timeout_s_;

  std::shared_ptr<SymmetricHeap> heap_;
  std::shared_ptr<Arena> arena_;
  ControlWindow control_;
  std::byte* window_ = nullptr;
  std::size_t window_bytes_ = 0;

  StreamHandle comm_stream_ = nullptr;
  StreamHandle run_stream_ = nullptr;  // where the call under way runs: the caller's stream or comm_stream_
  EventHandle latest_call_;            // calls run in order, on whatever streams: the next one waits for this
  std::shared_ptr<HomeStream> home_;   // that order, as the memory sees it
  std::shared_ptr<MemoryCache> cache_;
  bool recording_ = false;                    // the call under way is being recorded into a graph
  std::vector<std::shared_ptr<void>> owned_;  // what the next four point to
  KernelState* state_ = nullptr;              // device memory
  LayoutWork* layout_work_ = nullptr;         // device memory
  FaultRecord* faults_ = nullptr;      // pinned; [0] a fault that ended a call, [1] a note that none needed to end for
  HostCounts* host_counts_ = nullptr;  // pinned
  std::string broken_;                 // not empty: why every call throws
  bool broken_by_rdma_ = false;

  LowLatencyWindow low_latency_window_;
  LowLatencyState* low_latency_state_ = nullptr;  // device memory
  std::int32_t* mask_ = nullptr;                  // device memory, [num_ranks]; nullptr: no masking
  FaultRecord* masked_ = nullptr;                 // pinned, [num_ranks]: whom kernels masked
  std::byte* combine_buffer_ = nullptr;           // device memory
  std::size_t combine_buffer_bytes_ = 0;
  std::array<std::shared_ptr<LowLatencyQueue>, static_cast<std::size_t>(LowLatencyKind::count)> queues_;
  NodeMembership nodes_;
  std::vector<int> far_ranks_;  ///< that low-latency calls reach by RDMA
  int rail_width_ = 0;          ///< ranks of a node, where calls may go by rails; else 0
  LowLatencyStaging staging_;
  LowLatencyTold* told_ = nullptr;                  // device memory, [num_ranks]
  std::byte** low_latency_heaps_ = nullptr;         // device memory, [num_ranks]: as LowLatencyParams::heaps
  std::unique_ptr<rdma::Connections> connections_;  ///< nullptr: no rank is reached by RDMA
};

}  // namespace deep_ep
