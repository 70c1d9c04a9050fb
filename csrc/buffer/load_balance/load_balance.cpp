// Weights of experts to their replicas, gradients of replicas to their experts.
#include <algorithm>
#include <string>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/defaults.hpp"
#include "csrc/buffer/intranode/intranode.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "kernels/load_balance/params.hpp"

namespace deep_ep {
namespace {

constexpr std::uint32_t kMostPieceBytes = 8192;
constexpr int kPrefetchStages = 3;

/// Checks the tensors of a call, and lists them.
class LoadBalancePlan {
 public:
  LoadBalancePlan(Runtime& runtime, const IntranodeParams& common, const ConstTensorView& mapping, int num_sms)
      : runtime_(runtime), num_sms_(num_sms) {
    check_range("num_sms", num_sms, 0, defaults::kMostSms);
    const NodeMembership& nodes = runtime.nodes();
    params.common = common;
    if (nodes.num_nodes > 1) {
      const int width = nodes.ranks_of_each_node();
      params.first_rank = common.rank / width * width;
      params.common.rank -= params.first_rank;
      params.common.num_ranks = width;
      params.common.heaps += params.first_rank;
    }
    check_tensor("redundancy_mapping", mapping, runtime.device(), {DType::int32}, {num_ranks(), kAnySize});
    check_range("number of slots in redundancy_mapping", mapping.size(1), 1, INT32_MAX / num_ranks());
    params.mapping = mapping.as<std::int32_t>();
    params.num_slots = static_cast<int>(mapping.size(1));
  }

  /// `dtypes`: none for any.
  void add(const std::string& slots_name, const ConstTensorView& slots, const std::string& own_name,
           const ConstTensorView& own, std::initializer_list<DType> dtypes) {
    check_tensor(slots_name.c_str(), slots, runtime_.device(), dtypes, {params.num_slots, kAnySize});
    check_row_bytes(slots_name.c_str(), slots);
    if (!runtime_.in_heap(slots)) {
      fail<InvalidArgument>(
          "{} does not lie in the heap, allowed: memory of allocate_tensor, in Python that of "
          "lb_allocation_plan_or_num_bytes",
          slots_name);
    }
    const std::int64_t experts = params.num_local_experts == 0 ? kAnySize : params.num_local_experts;
    check_tensor(own_name.c_str(), own, runtime_.device(), dtypes, {experts, kAnySize});
    check_alignment(own_name.c_str(), own);
    check_range(("number of experts in " + own_name).c_str(), own.size(0), 1, INT32_MAX / num_ranks());
    const auto row_bytes = [](const ConstTensorView& of) { return of.size(1) * std::int64_t(size_of(of.dtype)); };
    if (row_bytes(own) != row_bytes(slots)) {
      fail<InvalidArgument>("{} has {} bytes for an expert, allowed: the {} of a slot of {}", own_name, row_bytes(own),
                            row_bytes(slots), slots_name);
    }
    params.num_local_experts = static_cast<int>(own.size(0));
    params.payloads[params.num_payloads++] = {
        .own = const_cast<std::byte*>(own.as<std::byte>()),
        .slots_at = static_cast<std::uint64_t>(slots.as<std::byte>() - runtime_.heap()->local()),
        .bytes = static_cast<std::uint32_t>(row_bytes(slots)),
        .first_piece = 0};
  }

  /// When all tensors are there. `kernel`: a number of its own.
  void finish(int kernel, std::uint32_t piece_bytes) {
    params.piece_bytes = piece_bytes;
    params.shape = 0xcbf29ce484222325;
    mix(static_cast<std::uint64_t>(kernel));
    mix(static_cast<std::uint64_t>(params.num_slots));
    mix(static_cast<std::uint64_t>(params.num_local_experts));
    for (int i = 0; i < params.num_payloads; ++i) {
      ExpertPayload& payload = params.payloads[i];
      payload.first_piece = params.num_pieces;
      params.num_pieces += (payload.bytes + piece_bytes - 1) / piece_bytes;
      mix(payload.slots_at);
      mix(payload.bytes);
    }
    params.wait = runtime_.faults().wait_context();
  }
  int blocks() const {
    return std::min(num_sms_ != 0 ? num_sms_ : defaults::kLoadBalanceSms, runtime_.policy().multiprocessors);
  }

  LoadBalanceParams params{};

 private:
  int num_ranks() const { return params.common.num_ranks; }  ///< of the node
  /// FNV-1a, by words.
  void mix(std::uint64_t word) { params.shape = (params.shape ^ word) * 0x100000001b3; }

  Runtime& runtime_;
  int num_sms_;
};

}  // namespace

EventHandle Intranode::prefetch_weights(const WeightPrefetch& weights, const CallOptions& call) {
  const std::size_t tensors = weights.redundant_expert_weights.size();
  if (tensors != weights.expert_weights.size() || tensors < 1 || tensors > kMostPayloads) {
    fail<InvalidArgument>(
        "redundant_expert_weights has {} tensors and expert_weights {}, allowed: equally many, 1 to {}", tensors,
        weights.expert_weights.size(), kMostPayloads);
  }
  LoadBalancePlan plan(runtime_, common_, weights.redundancy_mapping, weights.num_sms);
  for (std::size_t i = 0; i < tensors; ++i) {
    plan.add(fmt::format("redundant_expert_weights[{}]", i), weights.redundant_expert_weights[i],
             fmt::format("expert_weights[{}]", i), weights.expert_weights[i], {});
  }
  const int warps = std::min(runtime_.policy().warps_per_block, kernels::prefetch_weights::kMaxThreads / 32);
  const auto bytes = [warps](std::uint32_t of_stage) {
    return WarpStages(Carver::without_memory(), warps, kPrefetchStages, of_stage).bytes;
  };
  const std::size_t room = runtime_.policy().max_shared_bytes - bytes(0);
  const std::size_t of_stage = room / static_cast<std::size_t>(warps * kPrefetchStages) / kLine * kLine;
  runtime_.faults().raise();
  plan.params.stages = kPrefetchStages;
  plan.finish(0, static_cast<std::uint32_t>(std::min<std::size_t>(of_stage, kMostPieceBytes)));
  const std::size_t shared = bytes(plan.params.piece_bytes);
  CallScope scope(runtime_.calls(), call);
  runtime_.executor()->kernels().prefetch_weights(plan.params, {plan.blocks(), warps * 32, shared}, scope.stream());
  return scope.finish();
}

EventHandle Intranode::reduce_grads(const GradReduction& grads, const CallOptions& call) {
  LoadBalancePlan plan(runtime_, common_, grads.redundancy_mapping, grads.num_sms);
  plan.add("redundant_expert_grads", grads.redundant_expert_grads, "expert_grads", grads.expert_grads,
           {DType::float32});
  runtime_.faults().raise();
  plan.finish(1, kGradPieceBytes);
  // Loads of many warps hide how far away the peers' memory is.
  const int threads = runtime_.on_gpu() ? kernels::reduce_grads::kMaxThreads : runtime_.policy().warps_per_block * 32;
  CallScope scope(runtime_.calls(), call);
  runtime_.executor()->kernels().reduce_grads(plan.params, {plan.blocks(), threads}, scope.stream());
  return scope.finish();
}

}  // namespace deep_ep
