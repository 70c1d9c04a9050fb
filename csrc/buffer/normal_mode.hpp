// Normal mode: what its calls do on the host inside a node (intranode/) and between nodes (internode/).
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "csrc/buffer/call_scope.hpp"
#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/runtime.hpp"
#include "deep_ep/buffer.hpp"
#include "kernels/common/messages.hpp"
#include "kernels/common/rows.hpp"
#include "kernels/normal/layout.hpp"
#include "kernels/normal/params.hpp"

namespace deep_ep {

// Checks of arguments throw InvalidArgument.
void check_dispatch(const DispatchArguments& arguments, const Runtime& runtime);
/// What every dispatch brings: rows, and maybe scales.
void check_sent_rows(const ConstTensorView& x, const std::optional<ConstTensorView>& x_scales, const Config& config,
                     const Runtime& runtime);
void check_selections(const ConstTensorView& topk_idx, const std::optional<ConstTensorView>& topk_weights,
                      std::int64_t tokens, const Runtime& runtime);
/// Of a combine of either interface, for so many tokens.
template <class Arguments>
void check_biases(const Arguments& arguments, std::int64_t tokens, const Runtime& runtime) {
  for (const auto& [name, bias] : {std::pair("bias_0", &arguments.bias_0), std::pair("bias_1", &arguments.bias_1)}) {
    if (!*bias) continue;
    check_tensor(name, **bias, runtime.device(), {DType::bfloat16}, {tokens, arguments.x.size(1)});
    check_alignment(name, **bias);
  }
}
/// For a dispatch with exact sizes that is being recorded.
void check_recording(const CallScope& scope, bool exact);

/// What all ranks must agree on before rows may move.
CallShape call_shape(const ConstTensorView& x, const std::optional<ConstTensorView>& x_scales,
                     const std::optional<ConstTensorView>& topk_idx, const std::optional<ConstTensorView>& topk_weights,
                     int num_experts);
/// Rows and their scales alone.
SentRows sent_rows(const ConstTensorView& x, const std::optional<ConstTensorView>& x_scales);

/// Results of a dispatch; those that the caller does not want are undefined.
struct DispatchOutputs {
  Tensor x, scales, topk_idx, topk_weights, src_idx;
  bool in_heap = true;

  RowTargets targets() const {
    return {x.as<std::byte>(), scales.as<std::uint32_t>(), topk_idx.as<std::byte>(), topk_weights.as<float>(),
            src_idx.as<std::int32_t>()};
  }
};

/// In the heap, where that has room for all; else outside, see CallScope::result_tensors. `fresh`: the arguments of a
/// dispatch that is not cached.
DispatchOutputs make_outputs(const ConstTensorView& x, const std::optional<ConstTensorView>& x_scales,
                             const DispatchArguments* fresh, std::int64_t rows, const CallScope& scope);

/// Memory for the sums of `tokens` tokens, rows like those of `x`, with so many weights each, handed out to the caller.
CombineResult make_sums(const ConstTensorView& x, std::int64_t tokens, std::int64_t weights, const CallScope& scope);

/// Waits until the kernel of an exchange has stored `counts.epoch`, which was 0. Throws what the kernel has met
/// instead.
void wait_for_counts(Runtime& runtime, const HostCounts& counts, CallScope& scope);

/// The calls. What differs inside a node and between nodes is virtual.
class NormalMode {
 public:
  virtual ~NormalMode() = default;
  NormalMode(const NormalMode&) = delete;
  NormalMode& operator=(const NormalMode&) = delete;

  /// Needs no peer.
  DispatchLayout count(const ConstTensorView& topk_idx, int num_experts, const CallOptions& call);
  DispatchResult dispatch(const DispatchArguments& arguments, const CallOptions& call);
  CombineResult combine(const CombineArguments& arguments, const CallOptions& call);
  /// Of arguments that are right, as a part of a call. Hands nothing out.
  DispatchResult dispatch(const DispatchArguments& arguments, CallScope& scope);

  // Of the second interface: csrc/buffer/elastic/.
  virtual ElasticDispatchResult dispatch_elastic(const ElasticDispatchArguments& arguments,
                                                 const CallOptions& call) = 0;
  virtual CombineResult combine_elastic(const ElasticCombineArguments& arguments, const CallOptions& call) = 0;
  virtual EventHandle barrier(const CallOptions& call) = 0;

  Runtime& runtime() const { return runtime_; }

 protected:
  explicit NormalMode(Runtime& runtime);
  /// Behind the constructor, in an agreement of the ranks, as it may fail on one.
  void allocate();

  /// The same as a part of a call that has checked its arguments.
  DispatchLayout count(const ConstTensorView& topk_idx, int num_experts, const CallScope& scope) const;
  /// Tensors of the handle of a dispatch.
  static void hand_out(const DispatchHandle& handle, const CallScope& scope);

  /// InvalidArgument for the handle of another kind of dispatch.
  virtual void check_handle(const DispatchHandle& /*handle*/) const {}
  /// OutOfMemory, where that is known before rows are counted, for a dispatch of such rows.
  virtual void check_room(const RowShape& /*rows*/) const {}
  /// Makes the tables of the handle that counts fill, and enqueues the exchange.
  void notify(const NotifyCall& notify, DispatchHandle& handle, const CallScope& scope) const;
  /// Sends the rows to where the handle says. The last `weights` scales of a token are its weights.
  void send(const SentRows& rows, const Config& config, const DispatchHandle& handle, const DispatchOutputs& outputs,
            int weights, const CallScope& scope);
  void add_up(const CombineArguments& arguments, const CombineResult& result, const CallScope& scope);
  /// Without rings, and without what only dispatch or combine knows.
  TransferParams transfer(const DispatchHandle& handle) const;
  /// Both complete `params` by the rings and the roles of warps, and enqueue the kernel.
  virtual void launch(DispatchParams& params, const Config& config, const DispatchHandle& handle,
                      const DispatchOutputs& outputs, const CallScope& scope) = 0;
  virtual void launch(CombineParams& params, const CombineArguments& arguments, const CallScope& scope) = 0;
  /// Both share shared memory out to the warps that move rows, and enqueue the kernel.
  void enqueue(DispatchParams& params, int blocks, const CallScope& scope) const;
  void enqueue(CombineParams& params, int blocks, const CallScope& scope) const;

  Runtime& runtime_;
  NormalParams common_;                      ///< what every kernel is told; `peers`: between nodes
  std::shared_ptr<KernelState> state_;       ///< device memory
  std::shared_ptr<HostCounts> host_counts_;  ///< pinned, for the counts of a dispatch with exact sizes

 private:
  std::shared_ptr<LayoutWork> layout_work_;  ///< device memory
};

}  // namespace deep_ep
