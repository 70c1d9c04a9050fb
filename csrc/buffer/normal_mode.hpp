// Normal mode: what its calls do on the host. One node is the case without rails.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
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

/// Rows of any dispatch, and what travels beside them; with no experts scales alone. Checks all that it takes.
SentRows sent_rows(const DispatchArguments& arguments, int num_local_experts, const Runtime& runtime);
/// Of a combine of either interface, for so many tokens.
template <class Arguments>
void check_biases(const Arguments& arguments, std::int64_t tokens, const Runtime& runtime) {
  for (const auto& [name, bias] : {std::pair("bias_0", &arguments.bias_0), std::pair("bias_1", &arguments.bias_1)}) {
    if (!*bias) continue;
    check_tensor(name, **bias, runtime.device(), {DType::bfloat16}, {tokens, arguments.x.size(1)});
    check_alignment(name, **bias);
  }
}

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

/// Shares `room` bytes of a block's shared memory, less those `before`, out to the pipelines of `warps` warps, each
/// like `pipe`. A warp has as many whole rows as fit, from two to eight; rows too long for two are cut into pieces.
/// Returns the block's bytes.
std::size_t plan_stages(PipeShape& pipe, int warps, std::size_t row_bytes, std::size_t room, std::size_t before = 0);

/// Memory for the sums of `tokens` tokens, rows like those of `x`, with so many weights each, handed out to the caller.
/// Pointers of a kernel's parameters get the addresses.
CombineResult make_sums(const ConstTensorView& x, std::int64_t tokens, std::int64_t weights, void* sums_pointer,
                        void* weights_pointer, const CallScope& scope);

class NormalMode {
 public:
  /// Collective. Between nodes the runtime's layout has signals for them.
  explicit NormalMode(Runtime& of_buffer);
  NormalMode(const NormalMode&) = delete;
  NormalMode& operator=(const NormalMode&) = delete;

  /// Are there several nodes of equally many consecutive ranks? Calls go by rails then.
  bool rails() const { return common.peers != nullptr; }
  /// A line for Buffer::describe: also by how many queue pairs, and over which NIC.
  std::string describe() const;

  // Parts of a call that has checked its arguments.

  DispatchLayout count(const ConstTensorView& topk_idx, int num_experts, const CallScope& scope) const;
  /// `rows`: of the arguments. With a handle selections travel only if the rows have them.
  DispatchResult dispatch(const DispatchArguments& arguments, const SentRows& rows, CallScope& scope) const;
  /// Tensors of the handle of a dispatch.
  static void hand_out(const DispatchHandle& handle, const CallScope& scope);
  /// InvalidArgument for no handle, for that of other ranks or nodes, and where its dispatch had not so many tokens.
  void check_handle(const DispatchHandle* handle, std::int64_t tokens = kAnySize) const;

  // The counts of a fresh dispatch, whose kernel stores them for the host if the host waits for `exact` sizes.

  /// For the kernel. InvalidArgument in a recording: the host cannot wait there.
  HostCounts* counts_for_host(bool exact, const CallScope& scope) const;
  /// Waits until the kernel has stored all of them; throws what it has met instead. Returns those of this rank's
  /// experts.
  std::vector<int> wait_for_counts(int experts, CallScope& scope) const;

  Runtime& runtime;
  NormalParams common;                      ///< what every kernel is told
  std::shared_ptr<HostCounts> host_counts;  ///< pinned

 private:
  // Device memory, which kernels are told of.
  std::shared_ptr<KernelState> state_;
  std::shared_ptr<LayoutWork> layout_work_;
  std::shared_ptr<RailState> rail_states_;
};

}  // namespace deep_ep
