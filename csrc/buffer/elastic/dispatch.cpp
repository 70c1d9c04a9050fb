// dispatch of the second interface: one kernel sends and numbers, another one copies rows to the results.
#include <algorithm>
#include <numeric>
#include <vector>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/intranode/intranode.hpp"
#include "csrc/buffer/normal_mode.hpp"
#include "csrc/buffer/row_launch.hpp"
#include "csrc/buffer/row_metadata.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "kernels/elastic/dispatch_params.hpp"

namespace deep_ep {
namespace {

void check_max_tokens(std::int64_t tokens, int max_tokens, int num_ranks) {
  check_range("max_tokens", max_tokens, 1, INT32_MAX / (2 * num_ranks));
  check_range("number of tokens", tokens, 0, max_tokens);
}

void check_elastic_dispatch(const ElasticDispatchArguments& arguments, const NormalModeSetup& setup) {
  check_sent_rows(arguments.x, arguments.x_scales, arguments.config, setup);
  check_range("num_experts", arguments.num_experts, setup.num_ranks,
              std::int64_t{setup.num_ranks} * setup.max_local_experts);
  if (arguments.num_experts % setup.num_ranks != 0) {
    fail<InvalidArgument>("num_experts is {}, it must be a multiple of the {} ranks", arguments.num_experts,
                          setup.num_ranks);
  }
  check_selections(arguments.topk_idx, arguments.topk_weights, arguments.x.size(0), setup);
  check_range("expert_alignment", arguments.expert_alignment, 1, 1 << 20);
  check_max_tokens(arguments.x.size(0), arguments.max_tokens, setup.num_ranks);
  if (arguments.stats) {
    check_tensor("stats", *arguments.stats, setup.device, {DType::int32}, {arguments.num_experts / setup.num_ranks});
  }
}

void check_elastic_dispatch(const ElasticCachedDispatchArguments& arguments, const NormalModeSetup& setup) {
  check_sent_rows(arguments.x, arguments.x_scales, arguments.config, setup);
  const Device& device = setup.device;
  const std::int64_t tokens = arguments.x.size(0);
  check_max_tokens(tokens, arguments.max_tokens, setup.num_ranks);
  check_tensor("sent_to", arguments.sent_to, device, {DType::uint8}, {tokens, setup.num_ranks});
  check_tensor("source_ends", arguments.source_ends, device, {DType::int32}, {setup.num_ranks});
  const int topk = row_metadata(arguments.metadata, arguments.source_ends, device).num_topk;
  if (arguments.topk_weights) {
    check_tensor("topk_weights", *arguments.topk_weights, device, {DType::float32}, {tokens, topk});
  }
  check_tensor("local_topk_idx", arguments.local_topk_idx, device, {DType::int32},
               {arguments.expand ? kAnySize : arguments.metadata.size(0), topk});
  if (arguments.expert_counts) {
    check_tensor("expert_counts", *arguments.expert_counts, device, {DType::int32}, {kAnySize});
  }
  check_range("expert_alignment", arguments.expert_alignment, 1, 1 << 20);
  check_range("num_expanded", arguments.num_expanded, 0, INT32_MAX);
}

/// Takes the whole window of the heap, and as many tokens in a pass as it has room for. The same on all ranks.
void plan_window(ElasticDispatchParams& params, int max_tokens, std::size_t at, const NormalModeSetup& setup) {
  const auto ranks = static_cast<std::size_t>(setup.num_ranks);
  std::size_t used = at;
  if (params.fresh) {
    const auto selections = static_cast<std::size_t>(max_tokens) * static_cast<std::size_t>(params.rows.num_topk);
    params.told.headers_at = used;
    used += ranks * sizeof(ToldSelections::Header);
    params.told.selections_at = used;
    params.told.stride = static_cast<std::int64_t>(align_up(selections, 4));
    used = align_to_line(used + ranks * static_cast<std::size_t>(params.told.stride) * sizeof(std::int32_t));
  }
  LandingWindow& window = params.window;
  window.row_bytes = params.rows.row_bytes;
  window.words_beside =
      static_cast<std::uint32_t>(params.rows.num_scales + (params.weighted ? params.rows.num_topk : 0));
  window.max_tokens = max_tokens;
  const std::size_t beside = ranks * window.words_beside * sizeof(std::uint32_t);
  const std::size_t token = (ranks - 1) * window.row_bytes + beside;
  const std::size_t room = setup.window_bytes - std::min(setup.window_bytes, used - at + kLine);
  const std::size_t tokens = token == 0 ? static_cast<std::size_t>(max_tokens) : room / token;
  if (tokens == 0 || used - at > setup.window_bytes) {
    fail<OutOfMemory>(
        "the window of {} does not hold {} for the selections and {} for a token's rows from each rank: raise "
        "heap_bytes or window_bytes",
        format_bytes(setup.window_bytes), format_bytes(used - at), format_bytes(token));
  }
  window.tokens = static_cast<std::int32_t>(std::min<std::size_t>(tokens, static_cast<std::size_t>(max_tokens)));
  window.beside_at = used;
  window.rows_at = align_to_line(used + static_cast<std::size_t>(window.tokens) * beside);
}

constexpr std::int64_t kSelectionsOfBlock = 2048;  ///< that numbers them
/// Few selections are numbered by several blocks: on two H100 128 tokens take 30.1 us with 8 blocks and 33.5 with one.
constexpr std::int64_t kFewSelections = 256, kFewBlocks = 8;
constexpr std::int64_t kSelectionsOfTeller = 2048;

LaunchShape plan_launch(ElasticDispatchParams& params, const Config& config, const NormalModeSetup& setup) {
  const LaunchPolicy& policy = setup.policy;
  constexpr int kMostWarps = kernels::dispatch_elastic::kMaxThreads / 32;
  const int warps = std::min(config.warps_per_block != 0 ? config.warps_per_block : policy.warps_per_block, kMostWarps);
  // More warps than send: these number.
  const int all_warps = config.warps_per_block == 0 && setup.on_gpu() ? kMostWarps : warps;
  params.sending_warps = warps;
  const int sms = config.num_sms != 0 ? config.num_sms : Config::dispatch_default(setup.num_ranks).num_sms;
  // One multiprocessor at least numbers. Where there is one only, its block sends first.
  const int most = params.fresh ? std::max(1, policy.multiprocessors - 1) : policy.multiprocessors;
  const int useful = std::max(1, (params.num_tokens + warps - 1) / warps);
  params.sending_blocks = std::min({sms, most, useful});
  const std::int64_t own_selections = std::int64_t{params.num_tokens} * params.rows.num_topk;
  params.telling_blocks = static_cast<int>(std::clamp<std::int64_t>(
      (own_selections + kSelectionsOfTeller - 1) / kSelectionsOfTeller, 1, params.sending_blocks));

  DispatchNumbers& numbers = params.numbers;
  const auto bytes_to_number = [&](int counting_warps) {
    return DispatchNumbersShared(Carver::without_memory(), counting_warps, setup.num_ranks, params.num_local_experts)
        .bytes;
  };
  const auto bytes_to_send = [&](int stages, std::uint32_t stage_bytes) {
    return align_to_line(ElasticDispatchShared(Carver::without_memory(), warps, stages, stage_bytes).bytes);
  };
  int others = 0;  // blocks that only number
  std::size_t apart = 0;
  if (params.fresh) {
    const std::int64_t selections = setup.num_ranks * params.told.stride;
    const auto blocks_of = [&](std::int64_t each) { return (selections + each - 1) / each; };
    const std::int64_t useful_blocks =
        std::max(blocks_of(kSelectionsOfBlock), std::min(kFewBlocks, blocks_of(kFewSelections)));
    others =
        static_cast<int>(std::clamp<std::int64_t>(useful_blocks, 0, policy.multiprocessors - params.sending_blocks));
    numbers.blocks = std::max(1, others);
    numbers.warps = all_warps;
    const std::size_t room = policy.max_shared_bytes / (others == 0 ? 2 : 1) - kLine;
    while (numbers.warps > 1 && bytes_to_number(numbers.warps) > room) --numbers.warps;
    if (bytes_to_number(numbers.warps) > room) {
      fail<InvalidArgument>(
          "num_experts is {}, allowed: so many that the {} of each rank fit {} bytes of shared memory",
          params.num_local_experts * setup.num_ranks, params.num_local_experts, room);
    }
    if (others == 0) apart = bytes_to_number(numbers.warps);
  }
  const std::size_t per_warp =
      (policy.max_shared_bytes - apart - bytes_to_send(RowStages::kMost, 0)) / static_cast<std::size_t>(warps);
  const RowStages stages = RowStages::make(per_warp, params.rows.row_bytes);
  params.stages = stages.count;
  params.stage_bytes = stages.bytes;
  std::size_t shared_bytes = bytes_to_send(stages.count, stages.bytes);
  if (params.fresh) {
    numbers.shared_at = static_cast<std::uint32_t>(others == 0 ? shared_bytes : kLine);
    shared_bytes = std::max(shared_bytes, numbers.shared_at + bytes_to_number(numbers.warps));
  }
  return {params.sending_blocks + others, all_warps * 32, shared_bytes};
}

std::int64_t rounded_up(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }

/// The first rows of a tensor.
Tensor first_rows(const Tensor& tensor, std::int64_t rows) {
  TensorView view = tensor.view();
  view.shape[0] = rows;
  return {view, tensor.storage()};
}

/// Results of a dispatch; those that the caller does not want are undefined.
struct ElasticOutputs {
  Tensor x, scales, topk_idx, topk_weights;

  template <class Result>
  void give_to(Result& result) const {
    const auto if_wanted = [](const Tensor& tensor) {
      return tensor.defined() ? std::optional<Tensor>(tensor) : std::nullopt;
    };
    result.recv_x = x;
    result.recv_x_scales = if_wanted(scales);
    result.recv_topk_idx = if_wanted(topk_idx);
    result.recv_topk_weights = if_wanted(topk_weights);
  }
};

/// `rows`: received ones, `moved`: of the layout. The scales' rows lie next to each other if `column_major`.
ElasticOutputs make_elastic_outputs(const ConstTensorView& x, const std::optional<ConstTensorView>& scales,
                                    bool weighted, std::optional<DType> indices, int topk, std::int64_t rows,
                                    std::int64_t moved, bool expand, bool column_major, const CallScope& scope) {
  const Device& device = x.device;
  ElasticOutputs outputs;
  std::vector<TensorView> wanted = {unplaced(device, x.dtype, {moved, x.size(1)})};
  std::vector<Tensor*> made = {&outputs.x};
  const auto want = [&](Tensor& tensor, const TensorView& view) {
    made.push_back(&tensor);
    wanted.push_back(view);
  };
  if (scales && column_major) {
    want(outputs.scales, unplaced(device, scales->dtype, {scales->size(1), rounded_up(moved, 4)}));
  } else if (scales) {
    want(outputs.scales, unplaced(device, scales->dtype, {moved, scales->size(1)}));
  }
  if (!expand && indices) want(outputs.topk_idx, unplaced(device, *indices, {rows, topk}));
  if (weighted && expand) want(outputs.topk_weights, unplaced(device, DType::float32, {moved}));
  if (weighted && !expand) want(outputs.topk_weights, unplaced(device, DType::float32, {rows, topk}));
  std::vector<Tensor> tensors = scope.result_tensors({&wanted, 1});
  for (std::size_t i = 0; i < made.size(); ++i) {
    *made[i] = tensors[i];
    scope.hand_out(tensors[i]);
  }
  if (scales && column_major) {
    TensorView turned = outputs.scales.view();
    turned.shape = {moved, scales->size(1)};
    turned.strides = {1, rounded_up(moved, 4)};
    outputs.scales = Tensor(turned, outputs.scales.storage());
  }
  return outputs;
}

/// What copies the rows of a pass to the results.
SpreadRowsParams moving_params(const ElasticDispatchParams& sent, const ElasticOutputs& outputs,
                               const RowMetadata& metadata, const std::int32_t* local, bool expand,
                               std::byte* own_heap) {
  SpreadRowsParams params{};
  params.metadata = metadata;
  params.expand = expand;
  params.num_spread = outputs.x.size(0);
  params.heap = own_heap;
  params.window = sent.window;
  params.rank = sent.common.rank;
  params.num_ranks = sent.common.num_ranks;
  params.own_rows = sent.x;
  params.abort = sent.wait.abort;
  params.rows = own_heap;
  params.row_bytes = sent.rows.row_bytes;
  params.spread_rows = outputs.x.as<std::byte>();
  params.local = local;
  const auto* beside = reinterpret_cast<const std::uint32_t*>(own_heap + sent.window.beside_at);
  if (outputs.scales.defined()) {
    params.num_scales = sent.rows.num_scales;
    params.scales = beside;
    params.scale_stride = sent.window.words_beside;
    params.spread_scales = outputs.scales.as<std::uint32_t>();
    params.spread_stride = outputs.scales.view().stride(0);
    params.spread_column_stride = outputs.scales.view().stride(1);
  }
  if (outputs.topk_weights.defined()) {
    params.weights = beside + sent.rows.num_scales;
    params.weight_stride = sent.window.words_beside;
    params.spread_weights = outputs.topk_weights.as<std::uint32_t>();
  }
  if (outputs.topk_idx.defined()) {
    params.spread_topk_idx = outputs.topk_idx.as<std::byte>();
    params.indices_are_64_bit = outputs.topk_idx.view().dtype == DType::int64;
  }
  return params;
}

/// Gaps behind the experts' rows become zero.
void clear_gaps(SpreadRowsParams& params, const std::int32_t* expert_counts, int num_experts, int alignment) {
  params.expert_counts = expert_counts;
  params.num_experts = num_experts;
  params.alignment = alignment;
}

}  // namespace

void Intranode::move_elastic(ElasticDispatchParams& sent, SpreadRowsParams& moving, const Config& config,
                             CallScope& scope) {
  const KernelTable& kernels = runtime_.executor()->kernels();
  const LaunchShape shape =
      shape_for_pipelines(moving.metadata.num_rows + moving.num_experts, moving.row_bytes, setup_.policy,
                          kernels::spread_rows::kMaxThreads, moving.stages, moving.stage_bytes);
  for (bool first = true;; first = false) {
    if (!first || !sent.fresh) {
      const bool fresh = sent.fresh;
      sent.fresh = false;
      const LaunchShape sending = plan_launch(sent, config, setup_);
      kernels.dispatch_elastic(sent, sending, scope.stream());
      sent.fresh = fresh;
    }
    kernels.spread_rows(moving, shape, scope.stream());
    sent.window.first_token += sent.window.tokens;
    // All ranks have equally many passes: these follow from arguments that are equal on all ranks.
    if (sent.window.first_token >= sent.window.max_tokens) return;
    moving.window = sent.window;
    moving.spread_topk_idx = nullptr;
    moving.expert_counts = nullptr;
  }
}

ElasticDispatchResult Intranode::dispatch_elastic(const ElasticDispatchArguments& arguments, const CallOptions& call) {
  check_elastic_dispatch(arguments, setup_);
  runtime_.faults().raise();
  const int ranks = setup_.num_ranks, topk = static_cast<int>(arguments.topk_idx.size(1));
  const int experts = arguments.num_experts / ranks, alignment = arguments.expert_alignment;
  const std::int64_t tokens = arguments.x.size(0), most = std::int64_t{ranks} * arguments.max_tokens;
  ElasticDispatchParams params{};
  static_cast<SentRows&>(params) = sent_rows(arguments.x, arguments.x_scales);
  params.rows.num_topk = topk;
  params.num_local_experts = experts;
  params.topk_idx = {arguments.topk_idx.data, arguments.topk_idx.dtype == DType::int64};
  if (arguments.topk_weights) params.topk_weights = arguments.topk_weights->as<float>();
  params.common = common_;
  params.call.shape =
      call_shape(arguments.x, arguments.x_scales, arguments.topk_idx, arguments.topk_weights, arguments.num_experts);
  params.call.expert_alignment = alignment;
  params.fresh = true;
  params.weighted = arguments.topk_weights.has_value();
  plan_window(params, arguments.max_tokens, runtime_.layout().window_at(), setup_);
  const LaunchShape shape = plan_launch(params, arguments.config, setup_);

  CallScope scope(runtime_.calls(), call);
  check_recording(scope, arguments.exact);
  const Device& device = setup_.device;
  const auto table = [&](std::initializer_list<std::int64_t> sizes) { return unplaced(device, DType::int32, sizes); };
  std::vector<TensorView> wanted = {table({ranks}),
                                    table({experts}),
                                    table({experts}),
                                    table({most, RowMetadata::kColumnsBefore + topk}),
                                    table({most, topk}),
                                    table({tokens, topk}),
                                    unplaced(device, DType::uint8, {tokens, ranks}),
                                    table({params.numbers.blocks, DispatchNumbers::columns(ranks, experts)})};
  if (arguments.copy_selections) wanted.push_back(unplaced(device, arguments.topk_idx.dtype, {tokens, topk}));
  // One piece of memory, so that what only the kernel uses lives as long as the rest, too.
  const std::vector<Tensor> made = scope.pool_tensors(wanted);
  ElasticDispatchResult result;
  ElasticDispatchHandle& handle = result.handle;
  handle = {.source_ends = made[0],
            .expert_ends = made[1],
            .expert_counts = made[2],
            .metadata = made[3],
            .local_topk_idx = made[4],
            .rows_at_owners = made[5],
            .sent_to = made[6]};
  if (arguments.copy_selections) handle.topk_idx = made[8];
  scope.hand_out(made[0]);

  HostCounts& counts = *host_counts_;
  DispatchNumbers& numbers = params.numbers;
  params.wait = params.call.wait = runtime_.faults().wait_context();
  params.call.host_counts = arguments.exact ? &counts : nullptr;
  params.sent_to = handle.sent_to.as<std::uint8_t>();
  params.selected = handle.topk_idx.as<std::byte>();
  numbers.metadata = row_metadata(handle.metadata.view(), handle.source_ends.view(), device);
  numbers.local = handle.local_topk_idx.as<std::int32_t>();
  numbers.source_ends = handle.source_ends.as<std::int32_t>();
  numbers.expert_ends = handle.expert_ends.as<std::int32_t>();
  numbers.expert_counts = handle.expert_counts.as<std::int32_t>();
  numbers.stats = arguments.stats ? arguments.stats->as<std::int32_t>() : nullptr;
  numbers.rows_at_owners = handle.rows_at_owners.as<std::int32_t>();
  numbers.block_counts = made[7].as<std::int32_t>();
  numbers.expand = arguments.expand;
  numbers.clear_tail = !arguments.exact;
  if (arguments.exact) __atomic_store_n(&counts.epoch, 0, __ATOMIC_RELEASE);
  runtime_.executor()->kernels().dispatch_elastic(params, shape, scope.stream());

  std::int64_t received = most;
  result.num_expanded = rounded_up(most * topk + std::int64_t{alignment - 1} * experts, alignment);
  if (arguments.exact) {
    wait_for_counts(runtime_, counts, scope);
    received = counts.num_recv_tokens;
    result.num_recv_tokens_per_expert.assign(counts.tokens_per_expert, counts.tokens_per_expert + experts);
    result.num_expanded =
        std::accumulate(counts.tokens_per_expert, counts.tokens_per_expert + experts, std::int64_t{0});
    handle.metadata = first_rows(handle.metadata, received);
    handle.local_topk_idx = first_rows(handle.local_topk_idx, received);
  }
  const ElasticOutputs outputs = make_elastic_outputs(
      arguments.x, arguments.x_scales, params.weighted, arguments.topk_idx.dtype, topk, received,
      arguments.expand ? result.num_expanded : received, arguments.expand, arguments.column_major_scales, scope);
  SpreadRowsParams moving =
      moving_params(params, outputs, row_metadata(handle.metadata.view(), handle.source_ends.view(), device),
                    handle.local_topk_idx.as<std::int32_t>(), arguments.expand, runtime_.heap()->local());
  if (arguments.expand && arguments.zero_padding) clear_gaps(moving, numbers.expert_counts, experts, alignment);
  move_elastic(params, moving, arguments.config, scope);
  outputs.give_to(result);
  result.event = scope.finish();
  return result;
}

ElasticCachedDispatchResult Intranode::dispatch_elastic(const ElasticCachedDispatchArguments& arguments,
                                                        const CallOptions& call) {
  check_elastic_dispatch(arguments, setup_);
  runtime_.faults().raise();
  const RowMetadata metadata = row_metadata(arguments.metadata, arguments.source_ends, setup_.device);
  ElasticDispatchParams params{};
  static_cast<SentRows&>(params) = sent_rows(arguments.x, arguments.x_scales);
  params.common = common_;
  params.rows.num_topk = metadata.num_topk;
  params.weighted = arguments.topk_weights.has_value();
  if (params.weighted) params.topk_weights = arguments.topk_weights->as<float>();
  params.sent_to = const_cast<std::uint8_t*>(arguments.sent_to.as<std::uint8_t>());
  plan_window(params, arguments.max_tokens, runtime_.layout().window_at(), setup_);

  CallScope scope(runtime_.calls(), call);
  params.wait = runtime_.faults().wait_context();
  const std::optional<DType> indices = arguments.expand ? std::nullopt : std::optional(arguments.index_dtype);
  const ElasticOutputs outputs =
      make_elastic_outputs(arguments.x, arguments.x_scales, params.weighted, indices, metadata.num_topk,
                           metadata.num_rows, arguments.expand ? arguments.num_expanded : metadata.num_rows,
                           arguments.expand, arguments.column_major_scales, scope);
  SpreadRowsParams moving = moving_params(params, outputs, metadata, arguments.local_topk_idx.as<std::int32_t>(),
                                          arguments.expand, runtime_.heap()->local());
  if (arguments.expand && arguments.expert_counts) {
    clear_gaps(moving, arguments.expert_counts->as<std::int32_t>(), static_cast<int>(arguments.expert_counts->size(0)),
               arguments.expert_alignment);
  }
  move_elastic(params, moving, arguments.config, scope);
  ElasticCachedDispatchResult result;
  outputs.give_to(result);
  result.event = scope.finish();
  return result;
}

}  // namespace deep_ep
