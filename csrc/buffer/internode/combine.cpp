// combine between nodes: the sum of what the destination ranks hold for each token.
#include <algorithm>

#include "csrc/buffer/internode/internode.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "kernels/internode/combine_rows.hpp"

namespace deep_ep {

std::optional<Tensor> Internode::copy_in_heap(const ConstTensorView& tensor, const CallScope& scope) const {
  const TensorView wanted = unplaced(setup_.device, tensor.dtype, {tensor.size(0), tensor.size(1)});
  const auto made = scope.try_heap_tensors({&wanted, 1});
  if (!made) return std::nullopt;
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
  params.transfer = transfer(handle, params.row_bytes + static_cast<std::size_t>(params.num_topk) * 4, grid_.num_ranks);
  params.transfer.shape = shape_of({1, params.row_bytes, static_cast<std::uint32_t>(params.num_topk)});
  // What came from a node goes back to it.
  std::swap(params.transfer.counts.to_node, params.transfer.counts.from_node);
  params.bias[0] = arguments.bias_0 ? arguments.bias_0->as<std::byte>() : nullptr;
  params.bias[1] = arguments.bias_1 ? arguments.bias_1->as<std::byte>() : nullptr;
  params.num_rows = static_cast<std::int32_t>(handle.num_recv_rows);
  params.relay_rows = handle.relay_rows.as<std::int32_t>();
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();

  CallScope scope(runtime_.calls(), call);
  CombineResult result = make_sums(arguments.x, handle.num_tokens, num_weights(arguments), scope);
  params.combined_x = result.combined_x.as<std::byte>();
  if (weights) params.combined_weights = result.combined_topk_weights->as<float>();
  std::vector<Tensor> copies;  // until the call is enqueued: their memory is reused behind it
  bool pushed = false;
  if (x.size(0) == 0) {
    params.x = runtime_.heap()->local();
  } else {
    // Ranks of the node read the rows in the heap. Where it has no room for them, they are pushed.
    const auto readable = [&](const ConstTensorView& tensor) {
      if (pushed || runtime_.in_heap(tensor)) return tensor.data;
      const std::optional<Tensor> copy = copy_in_heap(tensor, scope);
      if (!copy) {
        pushed = true;
        return tensor.data;
      }
      copies.push_back(*copy);
      return static_cast<const void*>(copy->view().data);
    };
    params.x = static_cast<const std::byte*>(readable(x));
    if (weights) params.topk_weights = static_cast<const float*>(readable(*weights));
  }
  if (pushed && params.transfer.local.slots == 0) {
    fail<OutOfMemory>(
        "x or topk_weights lies outside the heap, where ranks of the node cannot read it; a heap of {} has no room for "
        "a copy of {}, and a quarter of its window of {} does not hold a row of {} for each of the {} ranks: raise "
        "heap_bytes or window_bytes, or make x by allocate_tensor",
        format_bytes(setup_.heap_bytes), format_bytes(x.bytes() + (weights ? weights->bytes() : 0)),
        format_bytes(setup_.window_bytes), format_bytes(params.transfer.local.slot_bytes), setup_.num_ranks);
  }

  const Config& config = arguments.config;
  const int sms = config.num_sms != 0 ? config.num_sms : Config::combine_default(setup_.num_ranks).num_sms;
  const int blocks = std::min(sms, setup_.policy.multiprocessors);
  const int most_warps = kernels::combine_and_notify_internode::kMaxThreads / 32;
  const int warps = plan_warps(params.transfer, config, blocks, most_warps, pushed);
  const std::size_t shared_bytes = InternodeCombineShared(Carver::without_memory(), params.transfer, blocks).bytes;
  runtime_.executor()->kernels().combine_and_notify_internode(params, {blocks, warps * 32, shared_bytes},
                                                              scope.stream());
  result.event = scope.finish();
  return result;
}

}  // namespace deep_ep
