// dispatch: exchange counts (unless a handle knows them), make room, send.
#include <array>
#include <thread>

#include "csrc/buffer/intranode/intranode.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/backoff.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/interrupt.hpp"

namespace deep_ep {

/// What a dispatch returns; undefined where it is not wanted.
struct DispatchOutputs {
  Tensor x, scales, topk_idx, topk_weights, src_idx;
  bool in_heap = true;

  RowTargets targets() const {
    return {x.as<std::byte>(), scales.as<std::uint32_t>(), topk_idx.as<std::byte>(), topk_weights.as<float>(),
            src_idx.as<std::int32_t>()};
  }
};

namespace {

/// In the heap, or, when that has no room for all, in the executor's pool. `fresh`: the arguments of a dispatch that is
/// not cached.
DispatchOutputs make_outputs(const ConstTensorView& x, const std::optional<ConstTensorView>& x_scales,
                             const DispatchArguments* fresh, std::int64_t rows, const CallScope& scope) {
  const Device& device = x.device;
  // The rows by themselves, as they are large and often dropped early; so is what a handle keeps, which lives long. The
  // others share one piece of memory.
  enum Piece : std::size_t { kRows, kOthers, kKept, kPieces };
  std::array<std::vector<TensorView>, kPieces> wanted;
  DispatchOutputs outputs;
  std::vector<Tensor*> others;
  const auto want_beside = [&](Tensor& tensor, DType dtype, std::int64_t width) {
    others.push_back(&tensor);
    wanted[kOthers].push_back(unplaced(device, dtype, {rows, width}));
  };
  wanted[kRows] = {unplaced(device, x.dtype, {rows, x.size(1)})};
  if (x_scales) want_beside(outputs.scales, x_scales->dtype, x_scales->size(1));
  if (fresh != nullptr) {
    wanted[kKept] = {unplaced(device, DType::int32, {rows})};
    if (fresh->topk_idx) {
      want_beside(outputs.topk_idx, fresh->topk_idx->dtype, fresh->topk_idx->size(1));
      want_beside(outputs.topk_weights, DType::float32, fresh->topk_idx->size(1));
    }
  }

  std::array<std::vector<Tensor>, kPieces> made;
  for (std::size_t piece = 0; piece < kPieces && outputs.in_heap; ++piece) {
    if (wanted[piece].empty()) continue;
    if (auto tensors = scope.try_heap_tensors(wanted[piece])) {
      made[piece] = *std::move(tensors);
    } else {
      outputs.in_heap = false;
    }
  }
  for (std::size_t piece = 0; piece < kPieces && !outputs.in_heap; ++piece) {
    if (!wanted[piece].empty()) made[piece] = scope.pool_tensors(wanted[piece]);
  }
  outputs.x = made[kRows].front();
  if (!made[kKept].empty()) outputs.src_idx = made[kKept].front();
  for (std::size_t i = 0; i < others.size(); ++i) *others[i] = made[kOthers][i];
  return outputs;
}

}  // namespace

DispatchHandle Intranode::notify(const DispatchArguments& arguments, CallScope& scope,
                                 std::vector<int>& tokens_per_expert) {
  NotifyPlan plan = plan_notify(arguments, setup_);
  DispatchHandle handle;
  handle.num_tokens = arguments.x.size(0);
  handle.num_experts = static_cast<int>(arguments.num_tokens_per_expert.size(0));
  handle.num_topk = arguments.topk_idx ? static_cast<int>(arguments.topk_idx->size(1)) : 0;
  const std::array wanted = {unplaced(setup_.device, DType::int32, {setup_.num_ranks, setup_.num_ranks}),
                             unplaced(setup_.device, DType::int32, {handle.num_tokens, setup_.num_ranks})};
  const std::vector<Tensor> tables = scope.pool_tensors(wanted);
  handle.rank_prefix_matrix = tables[0];
  handle.destination_row = tables[1];

  const bool exact = arguments.num_worst_tokens == 0;
  HostCounts& counts = *host_counts_;
  plan.params.common = common_;
  plan.params.wait = runtime_.faults().wait_context();
  plan.params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  plan.params.destination_row = handle.destination_row.as<std::int32_t>();
  plan.params.host_counts = exact ? &counts : nullptr;
  if (exact) __atomic_store_n(&counts.epoch, 0, __ATOMIC_RELEASE);
  runtime_.executor()->kernels().notify(plan.params, plan.shape, scope.stream());

  if (exact) {
    wait_for_counts(scope);
    handle.num_recv_rows = counts.num_recv_tokens;
    tokens_per_expert.assign(counts.tokens_per_expert, counts.tokens_per_expert + plan.params.num_local_experts);
  } else {
    handle.num_recv_rows = arguments.num_worst_tokens;
  }
  return handle;
}

void Intranode::wait_for_counts(CallScope& scope) {
  Faults& faults = runtime_.faults();
  const double timeout_s = runtime_.timeout_s();
  // The kernel has the real deadline, and says for which rank it waited. Ours is for a kernel that never started.
  const Deadline deadline(timeout_s == 0 ? 0 : timeout_s * 2 + 10);
  const Backoff backoff;
  for (std::uint64_t spins = 1; __atomic_load_n(&host_counts_->epoch, __ATOMIC_ACQUIRE) == 0; ++spins) {
    if (spins % 64 != 0) continue;
    if (faults.met()) break;
    if (spins % 4096 == 0) {
      if (!setup_.on_gpu()) std::this_thread::sleep_for(backoff.nap());  // the kernel needs the CPU
      if (InterruptScope::wanted()) {
        scope.abandon();  // so that its kernel is waited for
        faults.break_by_interruption();
      }
      if (deadline.expired()) {
        faults.break_by_timeout(
            fmt::format("rank {}: no counts of a dispatch arrived within {} s, and no kernel says why: "
                        "earlier work on the stream has not ended, or the GPU is lost",
                        runtime_.rank(), deadline.seconds()));
      }
    }
  }
  // Notes wait for the next call: the counts are exchanged, and the peers expect our rows.
  if (!faults.met()) return;
  scope.abandon();  // so that raise waits for the kernel
  faults.raise();
}

void Intranode::send(DispatchPlan& plan, const DispatchHandle& handle, const DispatchOutputs& outputs,
                     CallScope& scope) {
  DispatchParams& params = plan.params;
  params.common = common_;
  params.wait = runtime_.faults().wait_context();
  params.destination_row = handle.destination_row.as<std::int32_t>();
  params.rank_prefix_matrix = handle.rank_prefix_matrix.as<std::int32_t>();
  params.output = outputs.targets();
  params.output_rows = handle.num_recv_rows;
  if (!outputs.in_heap) plan_window(params, runtime_.window(), setup_);
  runtime_.executor()->kernels().dispatch(params, plan.shape, scope.stream());
  const Tensor* const used[] = {
      &outputs.x,       &outputs.scales,         &outputs.topk_idx,         &outputs.topk_weights,
      &outputs.src_idx, &handle.destination_row, &handle.rank_prefix_matrix};
  for (const Tensor* tensor : used) scope.hand_out(*tensor);
}

DispatchResult Intranode::dispatch(const DispatchArguments& arguments, const CallOptions& call) {
  check_dispatch(arguments, setup_);
  runtime_.faults().raise();
  DispatchPlan plan = plan_dispatch(arguments, setup_);
  CallScope scope(runtime_.calls(), call);
  if (scope.recording() && arguments.num_worst_tokens == 0) {
    throw InvalidArgument(
        "num_worst_tokens is 0, but the stream records a CUDA graph: the host cannot wait for sizes then (a cached "
        "dispatch needs none)");
  }

  // Who gets what? Then room for it: in the heap, where peers write the rows into place, or else behind the window.
  DispatchResult result;
  result.handle = notify(arguments, scope, result.num_recv_tokens_per_expert);
  const DispatchOutputs outputs =
      make_outputs(arguments.x, arguments.x_scales, &arguments, result.handle.num_recv_rows, scope);
  result.handle.recv_src_idx = outputs.src_idx;
  send(plan, result.handle, outputs, scope);
  result.recv_x = outputs.x;
  if (arguments.x_scales) result.recv_x_scales = outputs.scales;
  if (arguments.topk_idx) {
    result.recv_topk_idx = outputs.topk_idx;
    result.recv_topk_weights = outputs.topk_weights;
  }
  result.event = scope.finish();
  return result;
}

CachedDispatchResult Intranode::dispatch(const CachedDispatchArguments& arguments, const CallOptions& call) {
  check_dispatch(arguments, setup_);
  runtime_.faults().raise();
  DispatchPlan plan = plan_dispatch(arguments, setup_);
  CallScope scope(runtime_.calls(), call);
  const DispatchHandle& handle = *arguments.handle;
  const DispatchOutputs outputs = make_outputs(arguments.x, arguments.x_scales, nullptr, handle.num_recv_rows, scope);
  send(plan, handle, outputs, scope);
  CachedDispatchResult result;
  result.recv_x = outputs.x;
  if (arguments.x_scales) result.recv_x_scales = outputs.scales;
  result.event = scope.finish();
  return result;
}

}  // namespace deep_ep
