// dispatch of the second interface. In a node one kernel sends and numbers; between nodes a dispatch of normal mode
// brings the rows, and a kernel numbers them. Another kernel copies rows to the results.
#include <algorithm>
#include <numeric>

#include "csrc/buffer/defaults.hpp"
#include "csrc/buffer/elastic/elastic.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "kernels/elastic/params.hpp"

namespace deep_ep {
namespace {

/// InvalidArgument. The rows have been checked.
void check_arguments(const ElasticDispatchArguments& arguments, const Runtime& runtime) {
  const Device& device = runtime.device();
  const int ranks = runtime.num_ranks();
  const std::int64_t tokens = arguments.x.size(0);
  check_range("expert_alignment", arguments.expert_alignment, 1, 1 << 20);
  check_range("max_tokens", arguments.max_tokens, 1, INT32_MAX / (2 * ranks));
  check_range("number of tokens", tokens, 0, arguments.max_tokens);
  check_experts("num_experts", arguments.num_experts, ranks, runtime.options().max_local_experts);
  if (arguments.handle != nullptr) {
    const ElasticDispatchHandle& handle = *arguments.handle;
    const TensorView& metadata = handle.metadata.view();
    check_tensor("source_ends", handle.source_ends.view(), device, {DType::int32}, {ranks});
    const int topk = row_metadata(metadata, handle.source_ends.view(), device).num_topk;
    check_tensor("topk_idx", arguments.topk_idx, device, {DType::int32, DType::int64}, {tokens, topk});
    check_tensor("local_topk_idx", handle.local_topk_idx.view(), device, {DType::int32},
                 {arguments.expand ? kAnySize : metadata.size(0), topk});
    if (arguments.zero_padding) {
      check_tensor("expert_ends", handle.expert_ends.view(), device, {DType::int32}, {kAnySize});
    }
    check_range("num_expanded", handle.num_expanded, 0, INT32_MAX);
  } else if (arguments.stats) {
    check_tensor("stats", *arguments.stats, device, {DType::int32}, {arguments.num_experts / ranks});
  }
}

/// For a fresh dispatch. Chooses how many blocks, at most `most_blocks`, number the selections of `rows` rows, and how
/// many of the `warps` warps of each have room for their counters in shared memory, at least one. Returns a block's
/// bytes. InvalidArgument if one warp does not fit.
std::size_t plan_numbering(NumberingParams& params, const ElasticDispatchArguments& arguments, bool of_all_ranks,
                           std::int64_t rows, int most_blocks, int warps, const Runtime& runtime) {
  params.rank = runtime.rank();
  params.num_ranks = runtime.num_ranks();
  params.num_experts = arguments.num_experts / runtime.num_ranks();
  params.max_tokens = arguments.max_tokens;
  params.alignment = arguments.expert_alignment;
  params.metadata.num_topk = static_cast<int>(arguments.topk_idx.size(1));
  constexpr std::int64_t kOfBlock = 2048;
  // Few selections are numbered by several blocks: on two H100 128 tokens took 1.5 us longer than one token with 8
  // blocks, and 7.7 us longer with one.
  constexpr std::int64_t kFewOfBlock = 256, kFewBlocks = 32;
  const std::int64_t selections = rows * params.metadata.num_topk;
  const auto blocks_of = [&](std::int64_t each) { return (selections + each - 1) / each; };
  const std::int64_t useful = std::max(blocks_of(kOfBlock), std::min(kFewBlocks, blocks_of(kFewOfBlock)));
  params.blocks = static_cast<int>(std::clamp<std::int64_t>(useful, 1, most_blocks));
  params.warps = std::min(warps, NumberingParams::kMostWarps);
  const std::size_t room = runtime.policy().max_shared_bytes;
  const auto bytes = [&] { return NumberingShared{Carver::without_memory(), params, of_all_ranks}.bytes; };
  while (params.warps > 1 && bytes() > room) --params.warps;
  params.all_warps = params.blocks * params.warps;
  if (bytes() <= room) return bytes();
  fail<InvalidArgument>("num_experts is {}, allowed: so many that counters of {} experts fit {} bytes of shared memory",
                        params.num_experts * params.num_ranks, params.num_experts, room);
}

/// Tables for `rows` rows, in one piece of memory with what blocks tell each other, and `numbers` told of them.
/// `in_node`: selections of all ranks are numbered.
ElasticDispatchHandle make_tables(const ElasticDispatchArguments& arguments, std::int64_t rows, bool in_node,
                                  NumberingParams& numbers, KernelState& state, const CallScope& scope) {
  const std::int64_t tokens = arguments.x.size(0), topk = arguments.topk_idx.size(1), experts = numbers.num_experts;
  ElasticDispatchHandle handle;
  Tensor counts;
  WantedTensors wanted(arguments.x.device);
  wanted.add(handle.source_ends, &numbers.source_ends, DType::int32, {numbers.num_ranks});
  wanted.add(handle.expert_ends, &numbers.expert_ends, DType::int32, {experts});
  wanted.add(handle.expert_counts, &numbers.expert_counts, DType::int32, {experts});
  wanted.add(handle.metadata, nullptr, DType::int32, {rows, RowMetadata::kColumnsBefore + topk});
  wanted.add(handle.local_topk_idx, &numbers.local, DType::int32, {rows, topk});
  wanted.add(handle.own_rows, &numbers.own_rows, DType::int32, {tokens, topk});
  wanted.add(counts, &numbers.counts, DType::int32, {numbers.blocks, numbers.columns(in_node)});
  if (arguments.copy_selections) {
    wanted.add(handle.topk_idx, &numbers.selected, arguments.topk_idx.dtype, {tokens, topk});
  }
  scope.make_tables(wanted);
  scope.hand_out({&handle.source_ends});
  numbers.metadata = row_metadata(handle.metadata.view(), handle.source_ends.view(), arguments.x.device);
  numbers.stats = memory_of<std::int32_t>(arguments.stats);
  numbers.expand = arguments.expand;
  numbers.counted = &state.selections_counted;
  return handle;
}

/// Makes the tensors for received rows, handed out to the caller, and completes the arguments of the kernel that takes
/// rows there: `params` says where they, and words of scales and weights beside them, lie. The results have the counts
/// and the handle of a fresh dispatch.
void make_results(ElasticDispatchResult& results, const ElasticDispatchArguments& arguments, SpreadRowsParams& params,
                  const NormalMode& mode, const CallScope& scope) {
  const auto& scales = arguments.x_scales;
  const bool expand = params.expand = arguments.expand, fresh = arguments.handle == nullptr;
  const ElasticDispatchHandle& handle = fresh ? results.handle : *arguments.handle;
  params.abort = mode.common.wait.abort;
  params.row_bytes = static_cast<std::uint32_t>(row_bytes(arguments.x));
  params.metadata = row_metadata(handle.metadata.view(), handle.source_ends.view(), arguments.x.device);
  params.local = handle.local_topk_idx.as<std::int32_t>();
  if (fresh && arguments.exact) {
    const std::vector<int>& counts = results.num_recv_tokens_per_expert;
    results.handle.num_expanded = std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  } else if (fresh) {
    // A token may name an expert more than once: also where there are fewer experts than selections.
    const std::int64_t alignment = arguments.expert_alignment, experts = arguments.num_experts / mode.common.num_ranks;
    const std::int64_t selections =
        std::int64_t{mode.common.num_ranks} * arguments.max_tokens * params.metadata.num_topk;
    results.handle.num_expanded = align_up(selections + (alignment - 1) * experts, alignment);
  }
  const std::int64_t rows = params.metadata.num_rows, topk = params.metadata.num_topk;
  const std::int64_t moved = params.num_spread = expand ? handle.num_expanded : rows;
  if (arguments.zero_padding && expand) {
    params.expert_ends = handle.expert_ends.as<std::int32_t>();
    params.num_experts = static_cast<int>(handle.expert_ends.size(0));
    params.alignment = arguments.expert_alignment;
    params.sharing = std::min(arguments.expert_alignment, 64);
  }
  WantedTensors wanted(arguments.x.device);
  wanted.add(results.recv_x, &params.spread_rows, arguments.x.dtype, {moved, arguments.x.size(1)});
  if (scales) {
    // Their rows lie next to each other if `column_major_scales`.
    const std::int64_t width = scales->size(1), column = align_up(moved, 4);
    const bool turned = arguments.column_major_scales;
    wanted.add(results.recv_x_scales.emplace(), &params.spread_scales, scales->dtype,
               {turned ? width : moved, turned ? column : width});
    params.num_scales = static_cast<int>(width);
    params.spread_stride = turned ? 1 : width;
    params.spread_column_stride = turned ? column : 1;
  }
  if (!expand) {
    wanted.add(results.recv_topk_idx.emplace(), &params.spread_topk_idx, arguments.topk_idx.dtype, {rows, topk});
    params.indices_are_64_bit = arguments.topk_idx.dtype == DType::int64;
  }
  if (arguments.topk_weights) {
    wanted.add(results.recv_topk_weights.emplace(), &params.spread_weights,
               expand ? unplaced(arguments.x.device, DType::float32, {moved})
                      : unplaced(arguments.x.device, DType::float32, {rows, topk}));
  }
  scope.make_results(wanted);
  if (scales && arguments.column_major_scales) {
    TensorView turned = results.recv_x_scales->view();
    turned.shape = {moved, params.num_scales};
    turned.strides = {params.spread_stride, params.spread_column_stride};
    results.recv_x_scales = Tensor(turned, results.recv_x_scales->storage());
  }
}

// In a node.

/// Window and launch.
LaunchShape plan(ElasticDispatchParams& params, const ElasticDispatchArguments& arguments, const Runtime& runtime) {
  const auto ranks = static_cast<std::size_t>(runtime.num_ranks());
  std::size_t used = runtime.layout().window_at();
  if (params.fresh) {
    constexpr int kOfCell = ToldSelections::kOfCell;
    const std::int64_t selections = align_up(std::int64_t{arguments.max_tokens} * params.rows.num_topk, kOfCell);
    const std::int64_t most = ControlWindow::kFewSelections / runtime.num_ranks() / kOfCell * kOfCell;
    const ControlWindow& control = params.common.control;
    const bool few = selections <= most && params.num_local_experts * runtime.num_ranks() <= INT16_MAX;
    params.told.selections_at = few ? control.few_selections.offset : used;
    params.told.stride = few ? most : selections;
    params.told.turn_bytes = few ? ControlWindow::kFewSelectionsBytes : 0;
    if (!few) {
      used = align_to_line(params.told.selections_at +
                           ranks * static_cast<std::size_t>(params.told.stride) * sizeof(std::int32_t));
    }
  }
  params.window.row_stride = params.rows.row_bytes;
  params.window.parts = runtime.num_ranks() - 1;
  params.window.max_tokens = arguments.max_tokens;
  fit_window(params.window, used, runtime);

  const LaunchPolicy& policy = runtime.policy();
  const int all_warps = runtime.warps(kernels::dispatch_elastic::kMaxThreads);
  const int warps = std::min(policy.warps_per_block, all_warps);  // those that send; all number
  params.sending_warps = warps;
  // One block at least sends nothing: it numbers and receives. If it has no multiprocessor, it runs behind the others,
  // which do not wait for it.
  const int most =
      std::min(runtime.sms(arguments.num_sms, defaults::kDispatchSms), std::max(1, policy.multiprocessors - 1));
  const int useful = std::max(1, (params.num_tokens + warps - 1) / warps);
  params.sending_blocks = std::min(most, useful);
  // If few tokens leave a multiprocessor free, it tells, and no row waits for it.
  params.first_sender = params.fresh && params.sending_blocks < most ? 1 : 0;
  std::size_t shared_bytes = plan_stages(params.pipe, warps, params.rows.row_bytes, policy.max_shared_bytes);
  int others = 1;
  if (params.fresh) {
    // A warp has a word to the host to wait for.
    const int numbering = params.host_counts != nullptr && all_warps > 1 ? all_warps - 1 : all_warps;
    others = std::max(1, policy.multiprocessors - params.first_sender - params.sending_blocks);
    const std::int64_t rows = std::int64_t{runtime.num_ranks()} * arguments.max_tokens;
    shared_bytes =
        std::max(shared_bytes, plan_numbering(params.numbers, arguments, true, rows, others, numbering, runtime));
    others = params.numbers.blocks;
  }
  return {params.first_sender + params.sending_blocks + others, all_warps * 32, shared_bytes};
}

void dispatch_in_node(ElasticDispatchResult& result, const ElasticDispatchArguments& arguments,
                      const DispatchArguments& sent, const SentRows& rows, const NormalMode& mode, CallScope& scope) {
  Runtime& runtime = mode.runtime;
  ElasticDispatchParams params{};
  static_cast<SentRows&>(params) = rows;
  params.common = mode.common;
  params.window.words_beside =
      static_cast<std::uint32_t>(params.rows.num_scales + (arguments.topk_weights ? params.rows.num_topk : 0));
  params.fresh = arguments.handle == nullptr;
  if (params.fresh) {
    params.host_counts = mode.counts_for_host(arguments.exact, scope);
    params.shape = call_shape(sent, arguments.num_experts);
  }
  const LaunchShape shape = plan(params, arguments, runtime);
  ElasticDispatchHandle& handle = result.handle;
  if (params.fresh) {
    const std::int64_t most = std::int64_t{mode.common.num_ranks} * arguments.max_tokens;
    handle = make_tables(arguments, most, true, params.numbers, *mode.common.state, scope);
    runtime.launch(choices::dispatch_elastic, params, shape, scope);
    scope.begins();
    if (arguments.exact) {
      result.num_recv_tokens_per_expert = mode.wait_for_counts(rows.num_local_experts, scope);
      for (Tensor* const rows_of_all : {&handle.metadata, &handle.local_topk_idx}) {
        TensorView view = rows_of_all->view();
        view.shape[0] = params.host_counts->num_recv_tokens;
        *rows_of_all = {view, rows_of_all->storage()};
      }
    }
  }
  std::byte* const own_heap = runtime.heap()->local();
  TokenWindow& window = params.window;
  const auto* beside = reinterpret_cast<const std::uint32_t*>(own_heap + window.beside_at);
  SpreadRowsParams moving{};
  moving.rows = moving.heap = own_heap;
  if (arguments.x_scales) moving.scales = beside;
  if (arguments.topk_weights) moving.weights = beside + params.rows.num_scales;
  moving.scale_stride = moving.weight_stride = window.words_beside;
  moving.rank = mode.common.rank;
  moving.num_ranks = mode.common.num_ranks;
  moving.own_x = params.x;
  make_results(result, arguments, moving, mode, scope);
  // All ranks have equally many passes: these follow from arguments that are equal on all ranks.
  for (; window.first_token < window.max_tokens; window.first_token += window.tokens) {
    // Those of a fresh first pass have been sent.
    if (!params.fresh) runtime.launch(choices::dispatch_elastic, params, shape, scope);
    scope.begins();
    params.fresh = false;
    moving.window = window;
    spread_rows(moving, runtime.policy(), runtime, scope);
    moving.expert_ends = nullptr;
  }
}

// Between nodes.

void dispatch_by_rails(ElasticDispatchResult& result, const ElasticDispatchArguments& arguments, DispatchArguments sent,
                       SentRows rows, const NormalMode& mode, CallScope& scope) {
  const bool fresh = arguments.handle == nullptr;
  Runtime& runtime = mode.runtime;
  DispatchResult came = scope.inside([&] {
    if (fresh) {
      const DispatchLayout layout = mode.count(arguments.topk_idx, arguments.num_experts, scope);
      sent.use(layout);
      sent.num_worst_tokens = arguments.exact ? 0 : std::int64_t{mode.common.num_ranks} * arguments.max_tokens;
      return mode.dispatch(sent, rows, scope);
    }
    // The way of the earlier dispatch. Selections travel for the weights only.
    DispatchHandle route = arguments.handle->route;
    route.num_recv_rows = arguments.handle->local_topk_idx.size(0);
    sent.handle = &route;
    rows.send_src_idx = false;
    if (!arguments.topk_weights) rows.topk_idx = {}, rows.rows.num_topk = 0;
    return mode.dispatch(sent, rows, scope);
  });
  if (fresh) {
    constexpr int kMostBlocks = 128;
    const DispatchHandle& route = came.handle;
    NumberRowsParams params{};
    params.wait = mode.common.wait;
    NumberingParams& numbers = params.numbers;
    const std::size_t shared_bytes = plan_numbering(numbers, arguments, false, route.num_recv_rows,
                                                    std::min(runtime.policy().multiprocessors, kMostBlocks),
                                                    runtime.warps(kernels::number_selections::kMaxThreads), runtime);
    params.recv_topk_idx = indices_of(came.recv_topk_idx->view());
    params.source = route.recv_src_idx.as<std::int32_t>();
    params.ends = route.rank_prefix_matrix.as<std::int32_t>() + mode.common.grid.index();
    params.ends_stride = mode.common.grid.width;
    ElasticDispatchHandle& handle = result.handle =
        make_tables(arguments, route.num_recv_rows, false, numbers, *mode.common.state, scope);
    handle.route = route;
    handle.route.recv_src_idx = {};
    runtime.launch(choices::number_selections, params, {numbers.blocks, numbers.warps * 32, shared_bytes}, scope);
    Backend& executor = *runtime.executor();
    executor.fill(handle.own_rows.data(), 0xff, handle.own_rows.view().bytes(), scope.stream());
    if (arguments.copy_selections) {
      executor.copy(handle.topk_idx.data(), arguments.topk_idx.data, arguments.topk_idx.bytes(), scope.stream());
    }
  }
  result.num_recv_tokens_per_expert = std::move(came.num_recv_tokens_per_expert);
  SpreadRowsParams moving{};
  moving.rows = came.recv_x.as<std::byte>();
  moving.scales = memory_of<std::uint32_t>(came.recv_x_scales);
  moving.scale_stride = rows.rows.num_scales;
  moving.weights = memory_of<std::uint32_t>(came.recv_topk_weights);
  moving.weight_stride = rows.rows.num_topk;
  make_results(result, arguments, moving, mode, scope);
  spread_rows(moving, runtime.policy(), runtime, scope);
  NormalMode::hand_out((fresh ? result.handle : *arguments.handle).route, scope);
}

}  // namespace

ElasticDispatchResult Buffer::dispatch_elastic(const ElasticDispatchArguments& arguments, const CallOptions& call) {
  const BufferCall in(runtime_, "dispatch_elastic");
  const NormalMode& mode = in.normal();
  const DispatchArguments sent{.x = arguments.x,
                               .x_scales = arguments.x_scales,
                               .topk_idx = arguments.topk_idx,
                               .topk_weights = arguments.topk_weights,
                               .expert_alignment = arguments.expert_alignment,
                               .num_sms = arguments.num_sms};
  const SentRows rows = sent_rows(sent, arguments.num_experts / in->num_ranks(), *runtime_);
  check_arguments(arguments, *runtime_);
  if (mode.rails() && arguments.handle != nullptr) mode.check_handle(&arguments.handle->route, arguments.x.size(0));
  CallScope scope = in->begin(call);
  ElasticDispatchResult result;
  mode.rails() ? dispatch_by_rails(result, arguments, sent, rows, mode, scope)
               : dispatch_in_node(result, arguments, sent, rows, mode, scope);
  result.event = scope.finish();
  return result;
}

// Shared with combine.

RowMetadata row_metadata(const ConstTensorView& metadata, const ConstTensorView& source_ends, const Device& device) {
  check_strided_tensor("metadata", metadata, device, {DType::int32}, {kAnySize, kAnySize});
  check_range("width of metadata", metadata.size(1), RowMetadata::kColumnsBefore,
              RowMetadata::kColumnsBefore + kMaxTopk);
  if (metadata.stride(1) != 1) {
    fail<InvalidArgument>("metadata is {}, allowed: the columns of a row next to each other", metadata.describe());
  }
  return {.data = const_cast<std::int32_t*>(metadata.as<std::int32_t>()),
          .stride = metadata.stride(0),
          .num_rows = metadata.size(0),
          .num_topk = static_cast<int>(metadata.size(1)) - RowMetadata::kColumnsBefore,
          .num_valid = source_ends.as<std::int32_t>() + source_ends.size(0) - 1};
}

void fit_window(TokenWindow& window, std::size_t at, const Runtime& runtime) {
  const auto ranks = static_cast<std::size_t>(runtime.num_ranks());
  const std::size_t beside = ranks * window.words_beside * sizeof(std::uint32_t);
  const std::size_t token = static_cast<std::size_t>(window.parts) * window.row_stride + beside;
  const std::size_t used = at + kLine - runtime.layout().window_at();
  const std::size_t room = runtime.layout().window_bytes - std::min(runtime.layout().window_bytes, used);
  const auto most = static_cast<std::size_t>(window.max_tokens);
  window.tokens = static_cast<std::int32_t>(token == 0 ? most : std::min(room / token, most));
  window.beside_at = at;
  window.rows_at = align_to_line(at + static_cast<std::size_t>(window.tokens) * beside);
  if (window.tokens != 0 && used <= runtime.layout().window_bytes) return;
  fail<OutOfMemory>("the window of {} has {} left for rows, those of a token take {}: raise heap_bytes or window_bytes",
                    format_bytes(runtime.layout().window_bytes), format_bytes(room), format_bytes(token));
}

void spread_rows(SpreadRowsParams& params, const LaunchPolicy& policy, const Runtime& runtime, const CallScope& scope) {
  // A block for each multiprocessor, or for each of few rows and gaps: its warps share all shared memory.
  const int warps = std::min(policy.warps_per_block, kernels::spread_rows::kMaxThreads / 32);
  const std::int64_t units = params.metadata.num_rows + params.num_experts;
  const std::size_t shared_bytes = plan_stages(params.pipe, warps, params.row_bytes, policy.max_shared_bytes);
  const int blocks = static_cast<int>(std::clamp<std::int64_t>(units, 1, policy.multiprocessors));
  runtime.launch(choices::spread_rows, params, {blocks, warps * 32, shared_bytes}, scope);
}

}  // namespace deep_ep
