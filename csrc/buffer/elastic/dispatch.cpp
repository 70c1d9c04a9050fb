// dispatch of the second interface: one kernel sends and numbers, another one copies rows to the results.
#include <algorithm>

#include "csrc/buffer/defaults.hpp"
#include "csrc/buffer/elastic/elastic.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "kernels/elastic/dispatch_params.hpp"

namespace deep_ep {
namespace {

void plan_window(ElasticDispatchParams& params, int max_tokens, const Runtime& runtime) {
  const auto ranks = static_cast<std::size_t>(runtime.num_ranks());
  const std::size_t at = runtime.layout().window_at(), window_bytes = runtime.layout().window_bytes;
  std::size_t used = at;
  if (params.fresh) {
    const auto selections = static_cast<std::size_t>(max_tokens) * static_cast<std::size_t>(params.rows.num_topk);
    const ControlWindow& control = params.common.control;
    const bool few = selections <= ControlWindow::kFewSelections && control.few_selections_bytes() != 0;
    params.told.selections_at = few ? control.few_selections() : used;
    params.told.stride = few ? ControlWindow::kFewSelections : static_cast<std::int64_t>(align_up(selections, 4));
    params.told.turn_bytes = few ? control.few_selections_bytes() : 0;
    if (!few) {
      used = align_to_line(params.told.selections_at +
                           ranks * static_cast<std::size_t>(params.told.stride) * sizeof(std::int32_t));
    }
  }
  params.window.row_stride = params.rows.row_bytes;
  params.window.words_beside =
      static_cast<std::uint32_t>(params.rows.num_scales + (params.weighted ? params.rows.num_topk : 0));
  params.window.parts = runtime.num_ranks() - 1;
  params.window.max_tokens = max_tokens;
  const std::size_t token = fit_window(params.window, used, runtime);
  if (params.window.tokens == 0 || used - at > window_bytes) {
    fail<OutOfMemory>(
        "the window of {} does not hold {} for the selections and {} for a token's rows from each rank: raise "
        "heap_bytes or window_bytes",
        format_bytes(window_bytes), format_bytes(used - at), format_bytes(token));
  }
}

LaunchShape plan_launch(ElasticDispatchParams& params, int num_sms, const Runtime& runtime) {
  const LaunchPolicy& policy = runtime.policy();
  const int all_warps = runtime.warps(kernels::dispatch_elastic::kMaxThreads);
  const int warps = std::min(policy.warps_per_block, all_warps);  // those that send; all number
  params.sending_warps = warps;
  // One multiprocessor at least numbers and receives. Where there is one only, its block sends first.
  const int most = std::min(runtime.sms(num_sms, defaults::kDispatchSms), std::max(1, policy.multiprocessors - 1));
  const int useful = std::max(1, (params.num_tokens + warps - 1) / warps);
  params.sending_blocks = std::min(most, useful);
  // If few tokens leave a multiprocessor free, it tells, and no row waits for it.
  params.first_sender = params.fresh && params.sending_blocks < most ? 1 : 0;
  const int free = policy.multiprocessors - params.first_sender - params.sending_blocks;

  NumberingParams& numbers = params.numbers;
  int others = std::min(free, 1);         // blocks that send nothing
  std::size_t to_number = 0, beside = 0;  // bytes
  if (params.fresh) {
    // A warp has a word to the host to wait for.
    numbers.warps = params.host_counts != nullptr && all_warps > 1 ? all_warps - 1 : all_warps;
    const std::size_t room = policy.max_shared_bytes / (free == 0 ? 2 : 1);
    const std::int64_t selections = std::int64_t{runtime.num_ranks()} * params.window.max_tokens * params.rows.num_topk;
    to_number = fit_numbering(numbers, true, selections, free, room);
    others = std::min(free, numbers.blocks);
    if (others == 0) beside = to_number;
  }
  std::size_t shared_bytes =
      plan_stages(params.pipe, warps, params.rows.row_bytes, policy.max_shared_bytes - beside,
                  [&] { return align_to_line(WarpStages(Carver::without_memory(), warps, params.pipe).bytes); });
  if (params.fresh) {
    params.numbers_at = static_cast<std::uint32_t>(others == 0 ? shared_bytes : 0);
    shared_bytes = std::max(shared_bytes, params.numbers_at + to_number);
  }
  return {params.first_sender + params.sending_blocks + others, all_warps * 32, shared_bytes};
}

/// The first rows of a tensor.
Tensor first_rows(const Tensor& tensor, std::int64_t rows) {
  TensorView view = tensor.view();
  view.shape[0] = rows;
  return {view, tensor.storage()};
}

/// Takes all rows to the results, in passes. Where `sent` is fresh, those of the first pass have been sent.
void move_rows(ElasticDispatchParams& sent, const ElasticDispatchResult& results,
               const ElasticDispatchArguments& arguments, const ElasticDispatchHandle& handle, const Runtime& runtime,
               const CallScope& scope) {
  std::byte* const own_heap = runtime.heap()->local();
  const auto* beside = reinterpret_cast<const std::uint32_t*>(own_heap + sent.window.beside_at);
  SpreadRowsParams moving{};
  moving.abort = sent.wait.abort;
  moving.rows = moving.heap = own_heap;
  moving.row_bytes = sent.rows.row_bytes;
  moving.scales = beside;
  moving.weights = beside + sent.rows.num_scales;
  moving.scale_stride = moving.weight_stride = sent.window.words_beside;
  spread_to(results, arguments, handle, moving);
  moving.rank = sent.common.rank;
  moving.num_ranks = sent.common.num_ranks;
  moving.own_rows = sent.x;
  const KernelTable& kernels = runtime.executor()->kernels();
  const LaunchShape shape = plan_spreading(moving, runtime.policy());
  // All ranks have equally many passes: these follow from arguments that are equal on all ranks.
  for (; sent.window.first_token < sent.window.max_tokens; sent.window.first_token += sent.window.tokens) {
    if (!sent.fresh) {
      const LaunchShape sending = plan_launch(sent, arguments.num_sms, runtime);
      kernels.dispatch_elastic(sent, sending, scope.stream());
    }
    sent.fresh = false;
    moving.window = sent.window;
    kernels.spread_rows(moving, shape, scope.stream());
    moving.spread_topk_idx = nullptr;
    moving.expert_ends = nullptr;
  }
}

}  // namespace

ElasticDispatchResult Buffer::dispatch_elastic(const ElasticDispatchArguments& arguments, const CallOptions& call) {
  const BufferCall in(runtime_, "dispatch_elastic");
  NormalMode& mode = in.normal();
  const bool rails = mode.rails();
  DispatchArguments sent;
  sent.x = arguments.x;
  sent.x_scales = arguments.x_scales;
  sent.expert_alignment = arguments.expert_alignment;
  sent.num_sms = arguments.num_sms;
  sent.topk_idx = arguments.topk_idx;
  sent.topk_weights = arguments.topk_weights;
  check_elastic_dispatch(arguments, sent, *runtime_);
  if (rails && arguments.handle != nullptr) mode.check_dispatched(&arguments.handle->route, arguments.x.size(0));
  CallScope scope = in->begin(call);
  ElasticDispatchResult result;
  (mode.*(rails ? &NormalMode::dispatch_by_rails : &NormalMode::dispatch_in_node))(result, arguments, sent, scope);
  result.event = scope.finish();
  return result;
}

void NormalMode::dispatch_in_node(ElasticDispatchResult& result, const ElasticDispatchArguments& arguments,
                                  const DispatchArguments& sent, CallScope& scope) {
  const int experts = arguments.num_experts / common_.num_ranks;
  HostCounts& counts = *host_counts_;
  ElasticDispatchParams params{};
  static_cast<SentRows&>(params) = sent_rows(sent, experts);
  params.common = common_;
  params.wait = runtime_.faults().wait_context();
  params.weighted = arguments.topk_weights.has_value();
  params.fresh = arguments.handle == nullptr;
  if (params.fresh) {
    check_recording(scope, arguments.exact);
    params.shape = call_shape(sent, arguments.num_experts);
    params.host_counts = arguments.exact ? &counts : nullptr;
    params.numbers = numbering_params(arguments, runtime_);
  }
  plan_window(params, arguments.max_tokens, runtime_);
  const LaunchShape shape = plan_launch(params, arguments.num_sms, runtime_);
  ElasticDispatchHandle& handle = result.handle;
  if (params.fresh) {
    const std::int64_t most = std::int64_t{common_.num_ranks} * arguments.max_tokens;
    handle = make_elastic_tables(arguments, most, true, params.numbers, *common_.state, scope);
    if (arguments.exact) __atomic_store_n(&counts.epoch, 0, __ATOMIC_RELEASE);
    runtime_.executor()->kernels().dispatch_elastic(params, shape, scope.stream());
    std::vector<int>& of_experts = result.num_recv_tokens_per_expert;
    if (arguments.exact) {
      wait_for_counts(runtime_, counts, scope);
      of_experts.assign(counts.tokens_per_expert, counts.tokens_per_expert + experts);
      handle.metadata = first_rows(handle.metadata, counts.num_recv_tokens);
      handle.local_topk_idx = first_rows(handle.local_topk_idx, counts.num_recv_tokens);
    }
    handle.num_expanded = expanded_rows(arguments, common_.num_ranks, of_experts);
  }
  const ElasticDispatchHandle& tables = params.fresh ? handle : *arguments.handle;
  make_elastic_results(result, arguments, tables, scope);
  move_rows(params, result, arguments, tables, runtime_, scope);
}

}  // namespace deep_ep
