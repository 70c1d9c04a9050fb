// combine: the sum of what the destination ranks hold for each token.
#include "csrc/buffer/intranode/intranode.hpp"
#include "csrc/buffer/normal_mode.hpp"
#include "csrc/executor/kernel_table.hpp"

namespace deep_ep {

CombineResult Intranode::combine(const CombineArguments& arguments, const CallOptions& call) {
  check_combine(arguments, setup_);
  const ConstTensorView& x = arguments.x;
  const auto& weights = arguments.topk_weights;
  const bool pulled = pullable(runtime_, arguments);
  runtime_.faults().raise();
  CombinePlan plan = plan_combine(arguments, pulled, setup_);
  CombineParams& params = plan.params;

  CallScope scope(runtime_.calls(), call);
  CombineResult result = make_sums(arguments.x, params.num_tokens, num_weights(arguments), scope);
  params.combined_x = result.combined_x.as<std::byte>();
  if (weights) {
    params.combined_weights = result.combined_topk_weights->as<float>();
    if (x.size(0) != 0) params.topk_weights = weights->as<float>();
  }
  params.common = common_;
  params.wait = runtime_.faults().wait_context();
  params.x = x.size(0) == 0 ? runtime_.heap()->local() : x.as<std::byte>();
  params.window.rows = runtime_.window();
  runtime_.executor()->kernels().combine(params, plan.shape, scope.stream());
  result.event = scope.finish();
  return result;
}

}  // namespace deep_ep
