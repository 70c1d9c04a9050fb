// combine between nodes: the sum of what the destination ranks hold for each token.
#include <algorithm>

#include "csrc/buffer/internode/internode.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "kernels/internode/combine_rows.hpp"

namespace deep_ep {

Tensor Internode::in_heap(const ConstTensorView& tensor, const char* name, const CallScope& scope) const {
  const TensorView wanted = unplaced(setup_.device, tensor.dtype, {tensor.size(0), tensor.size(1)});
  const auto made = scope.try_heap_tensors({&wanted, 1});
  if (!made) {
    fail<OutOfMemory>(
        "{} lies outside the heap, where ranks of the node cannot read it, and a heap of {} has no room for a copy of "
        "{}: raise heap_bytes, or make {} by allocate_tensor{}",
        name, format_bytes(setup_.heap_bytes), format_bytes(tensor.bytes()), name, room_for_graphs(scope));
  }
  runtime_.executor()->copy(made->front().view().data, tensor.data, tensor.bytes(), scope.stream());
  return made->front();
}

CombineResult Internode::combine(const CombineArguments& arguments, const CallOptions& call) {
  check_combine(arguments, setup_);
  const DispatchHandle& handle = *arguments.handle;
  check_handle(handle);
  const ConstTensorView& x = arguments.x;
  const auto& weights = arguments.topk_weights;
  pullable(runtime_, arguments);
  runtime_.faults().raise();

  InternodeCombineParams params{};
  params.row_bytes = static_cast<std::uint32_t>(x.size(1) * 2);
  params.num_topk = weights ? static_cast<int>(weights->size(1)) : 0;
  params.transfer = transfer(handle, rings_for(params.row_bytes + static_cast<std::size_t>(params.num_topk) * 4));
  params.transfer.shape = shape_of({1, params.row_bytes, static_cast<std::uint32_t>(params.num_topk)});
  // What came from a node goes back to it.
  std::swap(params.transfer.counts.to_node, params.transfer.counts.from_node);
  params.bias[0] = arguments.bias_0 ? arguments.bias_0->as<std::byte>() : nullptr;
  params.bias[1] = arguments.bias_1 ? arguments.bias_1->as<std::byte>() : nullptr;
  params.num_rows = static_cast<std::int32_t>(handle.num_recv_rows);
  params.relay_rows = handle.relay_rows.as<std::int32_t>();
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();

  CallScope scope(runtime_.calls(), call);
  CombineResult result = make_sums(arguments, handle.num_tokens, scope);
  params.combined_x = result.combined_x.as<std::byte>();
  if (weights) params.combined_weights = result.combined_topk_weights->as<float>();
  Tensor x_copy, weights_copy;  // until the call is enqueued: their memory is reused behind it
  if (x.size(0) == 0) {
    params.x = runtime_.heap()->local();
  } else {
    params.x = x.as<std::byte>();
    if (!runtime_.in_heap(x)) {
      x_copy = in_heap(x, "x", scope);
      params.x = x_copy.as<std::byte>();
    }
    if (weights) params.topk_weights = weights->as<float>();
    if (weights && !runtime_.in_heap(*weights)) {
      weights_copy = in_heap(*weights, "topk_weights", scope);
      params.topk_weights = weights_copy.as<float>();
    }
  }

  const Config& config = arguments.config;
  const int sms = config.num_sms != 0 ? config.num_sms : Config::combine_default(setup_.num_ranks).num_sms;
  const int blocks = std::min(sms, setup_.policy.multiprocessors);
  const int warps =
      plan_warps(params.transfer, config, blocks, kernels::combine_and_notify_internode::kMaxThreads / 32);
  const int adding_warps = params.transfer.first_warps + params.transfer.second_warps;
  const std::size_t shared_bytes = InternodeCombineShared(Carver::without_memory(), grid_, blocks, adding_warps).bytes;
  runtime_.executor()->kernels().combine_and_notify_internode(params, {blocks, warps * 32, shared_bytes},
                                                              scope.stream());
  result.event = scope.finish();
  return result;
}

}  // namespace deep_ep
