#include "csrc/buffer/normal_mode.hpp"

#include <array>
#include <thread>
#include <vector>

#include "csrc/support/backoff.hpp"
#include "csrc/support/deadline.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/interrupt.hpp"

namespace deep_ep {

NormalModeSetup normal_mode_setup(const Runtime& runtime) {
  return {.num_ranks = runtime.num_ranks(),
          .max_local_experts = runtime.options().max_local_experts,
          .device = runtime.device(),
          .policy = runtime.policy(),
          .reject_unknown_experts = runtime.options().reject_unknown_experts,
          .heap_bytes = runtime.heap()->bytes(),
          .window_bytes = runtime.layout().window_bytes,
          .max_window_tokens = runtime.layout().control.max_window_tokens()};
}

std::shared_ptr<HostCounts> make_host_counts(const Runtime& runtime) {
  const auto experts = static_cast<std::size_t>(runtime.options().max_local_experts);
  return pinned_memory<HostCounts>(runtime.executor(), sizeof(HostCounts) + sizeof(std::int32_t) * experts);
}

DispatchHandle begin_handle(const DispatchArguments& arguments) {
  DispatchHandle handle;
  handle.num_tokens = arguments.x.size(0);
  handle.num_experts = num_experts(arguments);
  handle.num_topk = arguments.topk_idx ? static_cast<int>(arguments.topk_idx->size(1)) : 0;
  return handle;
}

DispatchOutputs make_outputs(const ConstTensorView& x, const std::optional<ConstTensorView>& x_scales,
                             const DispatchArguments* fresh, std::int64_t rows, const CallScope& scope) {
  // The rows by themselves, as they are large and often dropped early; so is what a handle keeps, which lives long. The
  // others share one piece of memory.
  std::array<std::vector<TensorView>, 3> wanted;
  auto& [rows_alone, beside, kept] = wanted;
  DispatchOutputs outputs;
  std::vector<Tensor*> places = {&outputs.x};
  rows_alone = {unplaced(x.device, x.dtype, {rows, x.size(1)})};
  const auto want_beside = [&](Tensor& tensor, DType dtype, std::int64_t width) {
    places.push_back(&tensor);
    beside.push_back(unplaced(x.device, dtype, {rows, width}));
  };
  if (x_scales) want_beside(outputs.scales, x_scales->dtype, x_scales->size(1));
  if (fresh != nullptr && fresh->topk_idx) {
    want_beside(outputs.topk_idx, fresh->topk_idx->dtype, fresh->topk_idx->size(1));
    want_beside(outputs.topk_weights, DType::float32, fresh->topk_idx->size(1));
  }
  if (fresh != nullptr) {
    places.push_back(&outputs.src_idx);
    kept = {unplaced(x.device, DType::int32, {rows})};
  }

  auto made = scope.try_heap_results(wanted);
  outputs.in_heap = made.has_value();
  if (!made) made = scope.result_tensors(wanted);
  for (std::size_t i = 0; i < places.size(); ++i) *places[i] = std::move((*made)[i]);
  return outputs;
}

std::optional<DispatchOutputs> outputs_in_window(const ConstTensorView& x,
                                                 const std::optional<ConstTensorView>& x_scales,
                                                 const DispatchArguments* fresh, std::int64_t rows,
                                                 const RowShape& shape, std::byte* memory, std::size_t bytes) {
  const auto count = static_cast<std::size_t>(rows);
  if (bytes < RowTargets::kParts * kLine || (bytes - RowTargets::kParts * kLine) / shape.all_bytes() < count) {
    return std::nullopt;
  }
  const RowTargets at = RowTargets::carve(Carver(memory), shape, count);
  const auto lend = [&](void* data, DType dtype, std::int64_t width) {
    return Tensor::borrow(TensorView::contiguous(data, dtype, {rows, width}, x.device));
  };
  DispatchOutputs outputs;
  outputs.x = lend(at.x, x.dtype, x.size(1));
  if (x_scales) outputs.scales = lend(at.scales, x_scales->dtype, x_scales->size(1));
  if (fresh == nullptr) return outputs;
  outputs.src_idx = Tensor::borrow(TensorView::contiguous(at.src_idx, DType::int32, {rows}, x.device));
  if (fresh->topk_idx) {
    outputs.topk_idx = lend(at.topk_idx, fresh->topk_idx->dtype, fresh->topk_idx->size(1));
    outputs.topk_weights = lend(at.topk_weights, DType::float32, fresh->topk_idx->size(1));
  }
  return outputs;
}

void wait_for_counts(Runtime& runtime, const HostCounts& counts, CallScope& scope) {
  Faults& faults = runtime.faults();
  const double timeout_s = runtime.timeout_s();
  // The kernel has the real deadline, and says for which rank it waited. Ours is for a kernel that never started.
  const Deadline deadline(timeout_s == 0 ? 0 : timeout_s * 2 + 10);
  const Backoff backoff;
  const bool on_cpu = runtime.device().kind != Device::Kind::cuda;
  for (std::uint64_t spins = 1; __atomic_load_n(&counts.epoch, __ATOMIC_ACQUIRE) == 0; ++spins) {
    if (spins % 64 != 0) continue;
    if (faults.met()) break;
    if (on_cpu) std::this_thread::sleep_for(backoff.nap());  // the kernel needs the processor
    if (spins % 4096 == 0 || on_cpu) {
      if (InterruptScope::wanted()) {
        scope.abandon();  // so that its kernel is waited for
        faults.break_by_interruption();
      }
      if (deadline.expired()) {
        faults.break_by_timeout(
            fmt::format("rank {}: no counts of a dispatch arrived within {} s, and no kernel says why: "
                        "earlier work on the stream has not ended, or the GPU is lost",
                        runtime.rank(), deadline.seconds()));
      }
    }
  }
  // Notes wait for the next call: the counts are exchanged, and the peers expect our rows.
  if (!faults.met()) return;
  scope.abandon();  // so that raise waits for the kernel
  faults.raise();
}

void check_recording(const CallScope& scope, bool exact) {
  if (!scope.recording() || !exact) return;
  throw InvalidArgument(
      "num_worst_tokens is 0, but the stream records a CUDA graph: the host cannot wait for sizes then (a cached "
      "dispatch needs none)");
}

CombineResult make_sums(const ConstTensorView& x, std::int64_t tokens, std::int64_t weights, const CallScope& scope) {
  std::vector<std::vector<TensorView>> wanted = {{unplaced(x.device, DType::bfloat16, {tokens, x.size(1)})}};
  if (weights != 0) wanted.push_back({unplaced(x.device, DType::float32, {tokens, weights})});
  const std::vector<Tensor> made = scope.result_tensors(wanted);
  for (const Tensor& tensor : made) scope.hand_out(tensor);
  CombineResult result;
  result.combined_x = made[0];
  if (weights != 0) result.combined_topk_weights = made[1];
  return result;
}

bool pullable(const Runtime& runtime, const CombineArguments& arguments) {
  const ConstTensorView& x = arguments.x;
  const auto& weights = arguments.topk_weights;
  // A rank that received nothing has nothing to read; frameworks give its empty tensors no address.
  const bool readable = x.size(0) == 0 || (runtime.in_heap(x) && (!weights || runtime.in_heap(*weights)));
  if (arguments.mode == CombineMode::pull && !readable) {
    throw InvalidArgument(
        "mode is pull but x or topk_weights does not lie in the symmetric heap: use received tensors, "
        "allocate_tensor, or another mode");
  }
  return readable;
}

}  // namespace deep_ep
