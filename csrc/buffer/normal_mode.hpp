// Normal mode: what its calls do on the host. One node is the case without rails.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
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

/// The rows of any dispatch, and their scales.
void check_sent_rows(const DispatchArguments& arguments, const Runtime& runtime);
/// Of a dispatch that has them.
void check_selections(const DispatchArguments& arguments, const Runtime& runtime);
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

inline TopkIndices indices_of(const ConstTensorView& topk_idx) {
  return {topk_idx.data, topk_idx.dtype == DType::int64};
}
/// Of a combine of either interface.
template <class Params, class Arguments>
void set_biases(Params& params, const Arguments& arguments) {
  params.bias[0] = memory_of<std::byte>(arguments.bias_0);
  params.bias[1] = memory_of<std::byte>(arguments.bias_1);
}

/// All that ranks must agree on before rows may move.
CallShape call_shape(const DispatchArguments& arguments, int num_experts);
/// Without what only one kind of dispatch sends; with a handle rows and scales alone.
SentRows sent_rows(const DispatchArguments& arguments, int num_local_experts);

/// Shares `room` bytes of a block's shared memory out to the pipelines of `warps` warps, each like `pipe`. A warp has
/// as many whole rows as fit, from two to eight; rows too long for two are cut into pieces. `bytes()`: of the block,
/// with that `pipe`. Returns these.
template <class Bytes>
std::size_t plan_stages(PipeShape& pipe, int warps, std::size_t row_bytes, std::size_t room, const Bytes& bytes) {
  constexpr std::uint32_t kMost = 8;
  pipe = {kMost, 0};
  const std::size_t of_warp = (room - bytes()) / static_cast<std::size_t>(warps);
  const std::size_t row = align_to_line(row_bytes);
  pipe.stages = static_cast<std::uint32_t>(std::clamp<std::size_t>(of_warp / row, 2, kMost));
  pipe.stage_bytes = static_cast<std::uint32_t>(std::min(row, of_warp / 2 / kLine * kLine));
  return bytes();
}

/// Memory in `result` for the rows of its handle and what is beside them: in the heap, where that has room for all;
/// else outside, see CallScope::results. With selections there are weights, wanted or not. Returns whether it is
/// in the heap.
bool make_room(const DispatchArguments& arguments, const SentRows& rows, DispatchResult& result,
               const CallScope& scope);

/// Memory for the sums of `tokens` tokens, rows like those of `x`, with so many weights each, handed out to the caller.
CombineResult make_sums(const ConstTensorView& x, std::int64_t tokens, std::int64_t weights, const CallScope& scope);

/// Waits until the kernel of an exchange has stored `counts.epoch`, which was 0. Throws what the kernel has met
/// instead.
void wait_for_counts(Runtime& runtime, const HostCounts& counts, CallScope& scope);

class NormalMode {
 public:
  /// Collective. Between nodes the runtime's layout has signals for them.
  explicit NormalMode(Runtime& runtime);
  NormalMode(const NormalMode&) = delete;
  NormalMode& operator=(const NormalMode&) = delete;

  /// What every kernel is told.
  const NormalParams& common() const { return common_; }
  /// Are there several nodes of equally many consecutive ranks? Calls go by rails then.
  bool rails() const { return common_.peers != nullptr; }

  /// A line for Buffer::describe: also by how many queue pairs, and over which NIC.
  std::string describe() const;

 private:
  friend class Buffer;

  // Parts of a call that has checked its arguments. They hand nothing out but results.

  DispatchLayout count(const ConstTensorView& topk_idx, int num_experts, const CallScope& scope) const;
  DispatchResult dispatch(const DispatchArguments& arguments, CallScope& scope);
  CombineResult combine(const CombineArguments& arguments, CallScope& scope);
  /// Of a dispatch without a handle: makes tables of the new handle, and enqueues the kernel that fills them.
  void exchange_counts(const DispatchArguments& arguments, DispatchHandle& handle, const CallScope& scope);
  /// Sends the rows to where the handle of the result says.
  void send(const SentRows& rows, int num_sms, const DispatchResult& result, bool in_heap,
            const CallScope& scope) const;
  /// Of dispatch_elastic: bring the rows to the results, which they make.
  void dispatch_in_node(ElasticDispatchResult& result, const ElasticDispatchArguments& arguments,
                        const DispatchArguments& sent, CallScope& scope);
  void dispatch_by_rails(ElasticDispatchResult& result, const ElasticDispatchArguments& arguments,
                         const DispatchArguments& sent, CallScope& scope);
  /// Between nodes: brings the rows; with a handle to where those of the earlier dispatch went.
  DispatchResult bring_elastic_rows(const ElasticDispatchArguments& arguments, DispatchArguments sent,
                                    CallScope& scope);
  /// Brings the rows of a combine to their tokens' ranks.
  ElasticReturn send_back(const ElasticCombineArguments& arguments, CallScope& scope);
  /// Tensors of the handle of a dispatch.
  static void hand_out(const DispatchHandle& handle, const CallScope& scope);

  /// InvalidArgument for no handle, and for that of another kind of dispatch.
  void check_handle(const DispatchHandle* handle) const;
  void check_combine(const CombineArguments& arguments) const;
  /// Of a dispatch of `tokens` tokens to the places of an earlier one.
  void check_dispatched(const DispatchHandle* handle, std::int64_t tokens) const;
  /// OutOfMemory, where that is known before rows are counted, for a dispatch of such rows.
  void check_room(const RowShape& rows) const;
  /// Without what only dispatch or combine knows, and without roles of warps.
  TransferParams transfer_params(const DispatchHandle& handle, std::size_t row_bytes, bool dispatches) const;

  Runtime& runtime_;
  NormalParams common_;
  std::shared_ptr<HostCounts> host_counts_;  ///< pinned, for the counts of a dispatch with exact sizes
  // Device memory, which kernels are told of.
  std::shared_ptr<KernelState> state_;
  std::shared_ptr<LayoutWork> layout_work_;
  std::shared_ptr<RailState> rail_states_;
};

}  // namespace deep_ep
