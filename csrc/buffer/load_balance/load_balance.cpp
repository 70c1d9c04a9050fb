// Weights of experts to their replicas, gradients of replicas to their experts.
#include <string>

#include "csrc/buffer/defaults.hpp"
#include "csrc/buffer/normal_mode.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "kernels/load_balance/params.hpp"

namespace deep_ep {
namespace {

/// Checks the slots and experts of one tensor, and lists it behind the others. `dtypes`: none for any.
void add_payload(LoadBalanceParams& params, const Runtime& runtime, const std::string& own_name,
                 const ConstTensorView& own, const ConstTensorView& slots, std::initializer_list<DType> dtypes) {
  const std::string slots_name = "redundant_" + own_name;
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

/// A call of the node. `add(params)` lists its tensors.
template <class Add>
EventHandle move_replicas(const BufferCall& in, const ConstTensorView& mapping, int num_sms, bool reduces,
                          const CallOptions& call, const Add& add) {
  Runtime& runtime = in.runtime();
  check_sms(num_sms);
  LoadBalanceParams params{};
  params.reduces = reduces;
  const NormalParams& all = in.normal(false).common;
  const int ranks = all.grid.width;
  params.common = all;
  params.first_rank = all.grid.first_of_node();
  params.common.rank = all.grid.index();
  params.common.num_ranks = ranks;
  params.common.heaps += params.first_rank;
  check_tensor("redundancy_mapping", mapping, runtime.device(), {DType::int32}, {ranks, kAnySize});
  check_range("number of slots in redundancy_mapping", mapping.size(1), 1, INT32_MAX / ranks);
  params.mapping = mapping.as<std::int32_t>();
  params.num_slots = static_cast<int>(mapping.size(1));
  add(params);
  params.shape = shape_of({params.shape, reduces ? 1 : 0, params.num_slots, params.num_local_experts});
  // Loads of many warps hide how far away the peers' memory is.
  const LaunchShape shape{.blocks = runtime.sms(num_sms, defaults::kLoadBalanceSms),
                          .threads = runtime.warps(kernels::move_replicas::kMaxThreads) * 32,
                          .shared_bytes = 0};
  CallScope scope = runtime.begin(call);
  runtime.launch(choices::move_replicas, params, shape, scope);
  scope.begins();
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
  const auto add = [&](LoadBalanceParams& params) {
    for (std::size_t i = 0; i < tensors; ++i) {
      add_payload(params, *runtime_, fmt::format("expert_weights[{}]", i), weights.expert_weights[i],
                  weights.redundant_expert_weights[i], {});
    }
  };
  return move_replicas(in, weights.redundancy_mapping, weights.num_sms, false, call, add);
}

EventHandle Buffer::reduce_grads(const GradReduction& grads, const CallOptions& call) {
  const BufferCall in(runtime_, "reduce_grads");
  return move_replicas(in, grads.redundancy_mapping, grads.num_sms, true, call, [&](LoadBalanceParams& params) {
    add_payload(params, *runtime_, "expert_grads", grads.expert_grads, grads.redundant_expert_grads, {DType::float32});
  });
}

}  // namespace deep_ep
