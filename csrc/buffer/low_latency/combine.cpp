// low_latency_combine, and the memory that experts may write its input to.
#include <tuple>

#include "csrc/buffer/low_latency/low_latency.hpp"

namespace deep_ep {

LowLatencyCombineResult LowLatency::combine(const LowLatencyCombineArguments& arguments, const CallOptions& call) {
  check_end(arguments.return_recv_hook, call);
  check_combine(arguments, setup_);
  look_after_earlier_calls();
  LowLatencyCombinePlan plan = plan_combine(arguments, setup_);
  make_way(LowLatencyKind::combine, arguments.return_recv_hook);

  CallScope scope(runtime_.calls(), call);
  LowLatencyCombineResult result;
  if (arguments.out) {
    result.combined_x = Tensor::borrow(*arguments.out);
  } else {
    const std::vector wanted = {unplaced(setup_.device, DType::bfloat16, {plan.params.num_tokens, plan.params.hidden})};
    result.combined_x = scope.result_tensors({&wanted, 1}).front();
    scope.hand_out(result.combined_x);
  }
  plan.params.combined_x = result.combined_x.as<std::byte>();
  if (setup_.measured) waits_->measure(plan);
  result.event = launch(LowLatencyKind::combine, plan, scope, call.stream,
                        std::tuple(result.combined_x, arguments.handle->row_table, arguments.owner), result.hook);
  return result;
}

TensorView LowLatency::combine_buffer(const LowLatencyHandle& handle) {
  check_handle(handle, setup_);
  const HandleRows rows = HandleRows::of(handle, runtime_.num_ranks());
  TensorView view = unplaced(setup_.device, DType::bfloat16, {rows.blocks, rows.rows, handle.hidden});
  if (view.bytes() > combine_buffer_bytes_) {
    runtime_.executor()->make_current();
    combine_buffers_.push_back(device_memory<std::byte>(runtime_.executor(), view.bytes()));
    combine_buffer_bytes_ = view.bytes();
  }
  view.data = combine_buffers_.empty() ? nullptr : combine_buffers_.back().get();
  return view;
}

}  // namespace deep_ep
