// Weights of experts to their replicas, gradients of replicas to their experts.
#include <string>

#include "csrc/buffer/defaults.hpp"
#include "csrc/buffer/normal_mode.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "kernels/load_balance/params.hpp"

namespace deep_ep {
namespace {

/// The arguments of a call of the node, without its tensors.
LoadBalanceParams params_of_call(const BufferCall& in, const ConstTensorView& mapping, int num_sms, bool reduces) {
  const Runtime& runtime = in.runtime();
  check_sms(num_sms);
  LoadBalanceParams params{};
  params.reduces = reduces;
  params.common = in.normal(false).common;
  const NodeMembership& nodes = runtime.nodes();
  if (nodes.num_nodes > 1) {
    const int width = nodes.ranks_of_each_node();
    params.first_rank = params.common.rank / width * width;
    params.common.rank -= params.first_rank;
    params.common.num_ranks = width;
    params.common.heaps += params.first_rank;
  }
  const int ranks = params.common.num_ranks;
  check_tensor("redundancy_mapping", mapping, runtime.device(), {DType::int32}, {ranks, kAnySize});
  check_range("number of slots in redundancy_mapping", mapping.size(1), 1, INT32_MAX / ranks);
  params.mapping = mapping.as<std::int32_t>();
  params.num_slots = static_cast<int>(mapping.size(1));
  return params;
}

/// Checks the slots and experts of one tensor, and lists it behind the others. `dtypes`: none for any.
void add_payload(LoadBalanceParams& params, const Runtime& runtime, const std::string& slots_name,
                 const ConstTensorView& slots, const std::string& own_name, const ConstTensorView& own,
                 std::initializer_list<DType> dtypes) {
  check_tensor(slots_name.c_str(), slots, runtime.device(), dtypes, {params.num_slots, kAnySize});
  check_row_bytes(slots_name.c_str(), slots);
  if (!runtime.in_heap(slots)) {
    fail<InvalidArgument>(
        "{} does not lie in the heap, allowed: memory of allocate_tensor, in Python that of "
        "lb_allocation_plan_or_num_bytes",
        slots_name);
  }
  const std::int64_t experts = params.num_local_experts == 0 ? kAnySize : params.num_local_experts;
  check_tensor(own_name.c_str(), own, runtime.device(), dtypes, {experts, kAnySize});
  check_alignment(own_name.c_str(), own);
  check_range(("number of experts in " + own_name).c_str(), own.size(0), 1, INT32_MAX / params.common.num_ranks);
  if (row_bytes(own) != row_bytes(slots)) {
    fail<InvalidArgument>("{} has {} bytes for an expert, allowed: the {} of a slot of {}", own_name, row_bytes(own),
                          row_bytes(slots), slots_name);
  }
  params.num_local_experts = static_cast<int>(own.size(0));
  const std::int64_t slots_at = slots.as<std::byte>() - runtime.heap()->local();
  const auto bytes = static_cast<std::uint32_t>(row_bytes(slots));
  params.payloads[params.num_payloads++] = {const_cast<std::byte*>(own.as<std::byte>()),
                                            static_cast<std::uint64_t>(slots_at), bytes, params.num_pieces};
  params.num_pieces += (bytes + LoadBalanceParams::kPieceBytes - 1) / LoadBalanceParams::kPieceBytes;
  params.shape = shape_of({params.shape, slots_at, slots_at >> 32, bytes});
}

/// When all tensors are there.
EventHandle enqueue(LoadBalanceParams& params, int num_sms, Runtime& runtime, const CallOptions& call) {
  params.shape = shape_of({params.shape, params.reduces ? 1 : 0, params.num_slots, params.num_local_experts});
  // Loads of many warps hide how far away the peers' memory is.
  const LaunchShape shape{.blocks = runtime.sms(num_sms, defaults::kLoadBalanceSms),
                          .threads = runtime.warps(kernels::move_replicas::kMaxThreads) * 32,
                          .shared_bytes = 0};
  CallScope scope = runtime.begin(call);
  runtime.launch(choices::move_replicas, params, shape, scope);
  return scope.finish();
}

}  // namespace

EventHandle Buffer::prefetch_weights(const WeightPrefetch& weights, const CallOptions& call) {
  const BufferCall in(runtime_, "prefetch_weights");
  const std::size_t tensors = weights.redundant_expert_weights.size();
  if (tensors != weights.expert_weights.size() || tensors < 1 || tensors > kMostPayloads) {
    fail<InvalidArgument>(
        "redundant_expert_weights has {} tensors and expert_weights {}, allowed: equally many, 1 to {}", tensors,
        weights.expert_weights.size(), kMostPayloads);
  }
  LoadBalanceParams params = params_of_call(in, weights.redundancy_mapping, weights.num_sms, false);
  for (std::size_t i = 0; i < tensors; ++i) {
    add_payload(params, *runtime_, fmt::format("redundant_expert_weights[{}]", i), weights.redundant_expert_weights[i],
                fmt::format("expert_weights[{}]", i), weights.expert_weights[i], {});
  }
  return enqueue(params, weights.num_sms, *runtime_, call);
}

EventHandle Buffer::reduce_grads(const GradReduction& grads, const CallOptions& call) {
  const BufferCall in(runtime_, "reduce_grads");
  LoadBalanceParams params = params_of_call(in, grads.redundancy_mapping, grads.num_sms, true);
  add_payload(params, *runtime_, "redundant_expert_grads", grads.redundant_expert_grads, "expert_grads",
              grads.expert_grads, {DType::float32});
  return enqueue(params, grads.num_sms, *runtime_, call);
}

}  // namespace deep_ep
