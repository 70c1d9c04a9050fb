// combine of the second interface. In a node one kernel pushes and adds, for each token, the rows of its experts'
// ranks. Between nodes, and where the biases are read later than the call, it is a dispatch of the rows back to their
// tokens, and sums of what came.
#include <algorithm>

#include "csrc/buffer/defaults.hpp"
#include "csrc/buffer/elastic/elastic.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "kernels/common/row_sum.hpp"
#include "kernels/elastic/params.hpp"

namespace deep_ep {
namespace {

/// InvalidArgument.
void check_arguments(const ElasticCombineArguments& arguments, const Runtime& runtime) {
  const Device device = runtime.device();
  const int ranks = runtime.num_ranks();
  check_tensor("x", arguments.x, device, {DType::bfloat16}, {kAnySize, kAnySize});
  check_row_bytes("x", arguments.x);
  check_tensor("topk_idx", arguments.topk_idx, device, {DType::int32, DType::int64}, {kAnySize, kAnySize});
  const std::int64_t tokens = arguments.topk_idx.size(0), topk = arguments.topk_idx.size(1);
  check_range("width of topk_idx", topk, 1, kMaxTopk);
  check_range("max_tokens", arguments.max_tokens, 1, INT32_MAX / std::max(2, ranks));
  check_range("number of tokens in topk_idx", tokens, 0, arguments.max_tokens);
  check_experts("num_experts", arguments.num_experts, ranks, runtime.options().max_local_experts);
  check_strided_tensor("metadata", arguments.metadata, device, {DType::int32},
                       {kAnySize, topk + RowMetadata::kColumnsBefore});
  check_tensor("source_ends", arguments.source_ends, device, {DType::int32}, {ranks});
  check_tensor("own_rows", arguments.own_rows, device, {DType::int32}, {tokens, topk});
  const std::int64_t received = arguments.metadata.size(0);
  if (!arguments.expanded && arguments.x.size(0) != received) {
    fail<InvalidArgument>("x has {} rows, allowed: the {} of metadata", arguments.x.size(0), received);
  }
  if (arguments.each_selection && !arguments.expanded) {
    fail<InvalidArgument>("each_selection is true, allowed: only with expanded");
  }
  if (arguments.topk_weights && arguments.each_selection) {
    fail<InvalidArgument>(
        "topk_weights is given, allowed: only without each_selection, in Python with allow_multiple_reduction");
  }
  if (const auto& weights = arguments.topk_weights) {
    arguments.expanded ? check_tensor("topk_weights", *weights, device, {DType::float32}, {arguments.x.size(0)})
                       : check_tensor("topk_weights", *weights, device, {DType::float32}, {received, topk});
  }
  check_biases(arguments, tokens, runtime);
  check_sms(arguments.num_sms);
}

/// Of a row: a warp adds a piece at once.
int pieces_of(std::uint32_t row_bytes) {
  constexpr std::uint32_t kPieceBytes = device::RowSum::kPieceBytes;
  return static_cast<int>((row_bytes + kPieceBytes - 1) / kPieceBytes);
}

// In a node.

constexpr int kAddingBlocks = 2;  ///< that only add, for each that pushes; fewer if multiprocessors run out

/// Window and launch.
LaunchShape plan(ElasticCombineParams& params, int max_tokens, int num_sms, const Runtime& runtime) {
  TokenWindow& window = params.window;
  window.parts = params.each_selection ? int{params.num_topk} : std::min<int>(runtime.num_ranks(), params.num_topk);
  window.row_stride = static_cast<std::uint32_t>(align_to_line(params.row_bytes));
  window.words_beside = params.each_selection ? 1 : params.weighted ? static_cast<std::uint32_t>(params.num_topk) : 0;
  window.max_tokens = max_tokens;
  fit_window(window, runtime.layout().window_at(), runtime);
  window.tokens = std::min(window.tokens, static_cast<std::int32_t>(runtime.layout().control.max_window_tokens));
  const LaunchPolicy& policy = runtime.policy();
  const int blocks = runtime.sms(num_sms, defaults::kCombineSms);
  const int warps = runtime.warps(kernels::combine_elastic::kMaxThreads);
  // `sms` bounds what touches other devices. To add takes more: most of what is read lies in this device's memory.
  const int adding_blocks = std::min(policy.multiprocessors - blocks, kAddingBlocks * blocks);
  const int tokens = std::min(params.num_tokens, window.tokens);
  // Fewer warps push if each selection's row travels: these are more, and too many at once hold each other up. Else all
  // warps of these blocks push if others add. Half of them took 232 us instead of 191 for 4096 tokens of two ranks, and
  // 746 instead of 576 with four; rows of an expanded layout, which are added up before, 389 instead of 329. With so
  // many blocks that as many others are not left, half of the warps keep the links busy.
  const bool many_add = adding_blocks >= kAddingBlocks * blocks;
  const bool all_push = many_add || (adding_blocks >= blocks && (params.expanded || tokens <= blocks * warps));
  params.pushing_blocks = blocks;
  params.adding_warps = runtime.num_ranks() == 1 ? warps
                        : params.each_selection  ? warps * 3 / 4
                        : all_push               ? 0
                                                 : warps / 2;
  const int adders = std::max(1, adding_blocks * warps + blocks * params.adding_warps);
  const int pieces = pieces_of(params.row_bytes);
  // All adders have something to do. Many tokens are added whole, unless several rows of each lie on this rank: then
  // the first ones would take as long as all adders need to read theirs, and so would the last ones.
  const int of_many = params.expanded ? pieces : tokens >= 2 * adders ? 1 : 2;
  const int wanted = tokens >= adders ? of_many : std::max(2, adders / std::max(1, tokens));
  params.parts_per_token = std::clamp(wanted, 1, pieces);
  return {blocks + adding_blocks, warps * 32,
          ElasticCombineShared{Carver::without_memory(), runtime.num_ranks()}.bytes};
}

// By a dispatch back.

/// Enqueues a kernel with a warp for each unit of work, as far as the device has room for warps that have no shared
/// memory.
template <class Params>
void launch(const KernelChoice<Params>& kernel, const Params& params, std::int64_t units, const Runtime& runtime,
            const CallScope& scope) {
  constexpr int kBlocksOfMultiprocessor = 8;
  if (units == 0) return;
  const LaunchPolicy& policy = runtime.executor()->policy();
  const int warps = std::min(policy.warps_per_block, kernel.max_threads / 32);
  const std::int64_t most = std::int64_t{policy.multiprocessors} * kBlocksOfMultiprocessor;
  const int blocks = static_cast<int>(std::min((units + warps - 1) / warps, most));
  runtime.launch(kernel, params, {blocks, warps * 32, 0}, scope);
}

/// Brings the rows to their tokens' ranks.
ElasticReturn send_back(const ElasticCombineArguments& arguments, const NormalMode& mode, CallScope& scope) {
  const Runtime& runtime = mode.runtime;
  const Device device = runtime.device();
  const RowMetadata metadata = row_metadata(arguments.metadata, arguments.source_ends, device);
  const int ranks = runtime.num_ranks(), columns = arguments.topk_weights ? 1 + metadata.num_topk : 1;
  SumRowsParams params{};
  params.rows = arguments.x.as<std::byte>();
  params.num_rows = arguments.x.size(0);
  params.metadata = metadata;
  params.each_selection = arguments.each_selection;
  params.num_ranks = ranks;
  params.max_tokens = arguments.max_tokens;
  params.sent_weights = memory_of<float>(arguments.topk_weights);
  const bool adds = arguments.expanded && !arguments.each_selection;
  const std::int64_t sent = adds ? metadata.num_rows : arguments.x.size(0);
  check_token_count("number of rows in x", sent, runtime.nodes());
  Tensor counts, is_sent, beside, sums;
  WantedTensors tables(device);
  tables.add(counts, nullptr, DType::int32, {ranks});
  tables.add(is_sent, &params.is_token_in_rank, DType::boolean, {sent, ranks});
  tables.add(beside, &params.beside, DType::int32, {sent, columns});
  if (adds) {
    tables.add(sums, &params.sums, DType::bfloat16, {sent, arguments.x.size(1)});
    params.row_bytes = static_cast<std::uint32_t>(row_bytes(arguments.x));
  }
  scope.make_tables(tables);
  const auto before = static_cast<std::size_t>(is_sent.as<std::byte>() - counts.as<std::byte>());
  runtime.executor()->fill(counts.data(), 0, before + is_sent.view().bytes(), scope.stream());
  params.pieces = std::max(1, pieces_of(params.row_bytes));
  launch(choices::sum_rows, params, metadata.num_rows * params.pieces, runtime, scope);

  DispatchArguments back;
  back.x = adds ? sums.view() : arguments.x;
  back.x_scales = beside.view();
  back.num_tokens_per_expert = counts.view();
  back.is_token_in_rank = is_sent.view();
  back.num_worst_tokens = std::int64_t{arguments.max_tokens} *
                          (arguments.each_selection ? int{metadata.num_topk} : std::min<int>(metadata.num_topk, ranks));
  back.num_sms = arguments.num_sms;
  const DispatchResult came = mode.dispatch(back, sent_rows(back, 1, runtime), scope);
  return {.arguments = arguments,
          .rows = came.recv_x,
          .beside = *came.recv_x_scales,
          .ends = came.handle.rank_prefix_matrix};
}

/// Sums of what came.
CombineResult sum_returned(const ElasticReturn& back, const Runtime& runtime, const CallScope& scope) {
  const ElasticCombineArguments& arguments = back.arguments;
  const ConstTensorView& topk_idx = arguments.topk_idx;
  const std::int64_t tokens = topk_idx.size(0), topk = topk_idx.size(1), width = back.ends.size(1);
  const Tensor row_of = scope.pool_tensor(unplaced(runtime.device(), DType::int32, {tokens, topk}));
  SumRowsParams params{};
  params.rows = back.rows.as<std::byte>();
  params.num_rows = back.rows.size(0);
  set_biases(params, arguments);
  params.row_bytes = static_cast<std::uint32_t>(back.rows.size(1) * 2);
  params.metadata = {
      .data = back.beside.as<std::int32_t>(),
      .stride = back.beside.size(1),
      .num_rows = params.num_rows,
      .num_topk = static_cast<int>(topk),
      .num_valid = back.ends.as<std::int32_t>() + (runtime.num_ranks() - 1) * width + runtime.rank() % width};
  params.row_of = row_of.as<std::int32_t>();
  params.topk_idx = indices_of(topk_idx);
  params.num_tokens = tokens;
  params.num_experts = arguments.num_experts / runtime.num_ranks();
  params.num_ranks = runtime.num_ranks();
  params.each_selection = arguments.each_selection;
  params.pieces = pieces_of(params.row_bytes);
  if (tokens != 0) launch(choices::sum_rows, params, (params.num_rows + 31) / 32, runtime, scope);
  CombineResult result =
      make_sums(back.rows.view(), tokens, arguments.topk_weights ? topk : 0, &params.sums, &params.weights, scope);
  launch(choices::sum_rows, params, tokens * params.pieces, runtime, scope);
  return result;
}

}  // namespace

CombineResult Buffer::combine_elastic(const ElasticCombineArguments& arguments, const CallOptions& call) {
  const BufferCall in(runtime_, "combine_elastic");
  const NormalMode& mode = in.normal();
  check_arguments(arguments, *runtime_);
  CallScope scope = in->begin(call);
  if (mode.rails()) {
    const ElasticReturn back = scope.inside([&] { return send_back(arguments, mode, scope); });
    CombineResult result = sum_returned(back, *runtime_, scope);
    result.event = scope.finish();
    return result;
  }
  ElasticCombineParams params{};
  params.common = mode.common;
  params.num_topk = static_cast<int>(arguments.topk_idx.size(1));
  params.num_local_experts = arguments.num_experts / mode.common.num_ranks;
  params.others = mode.common.num_ranks - 1;
  params.row_bytes = static_cast<std::uint32_t>(arguments.x.size(1) * 2);
  params.expanded = arguments.expanded;
  params.each_selection = arguments.each_selection;
  params.weighted = arguments.topk_weights.has_value();
  params.topk_idx = indices_of(arguments.topk_idx);
  params.own_rows = arguments.own_rows.as<std::int32_t>();
  params.num_tokens = static_cast<std::int32_t>(arguments.topk_idx.size(0));
  set_biases(params, arguments);
  params.x = arguments.x.as<std::byte>();
  params.num_rows = arguments.x.size(0);
  params.metadata = row_metadata(arguments.metadata, arguments.source_ends, in->device());
  params.source_ends = arguments.source_ends.as<std::int32_t>();
  params.weights = memory_of<float>(arguments.topk_weights);
  const LaunchShape shape = plan(params, arguments.max_tokens, arguments.num_sms, *runtime_);
  CombineResult result = make_sums(arguments.x, params.num_tokens, params.weighted ? int{params.num_topk} : 0,
                                   &params.combined_x, &params.combined_weights, scope);
  // All ranks have equally many passes: these follow from arguments that are equal on all ranks.
  for (TokenWindow& window = params.window; window.first_token < window.max_tokens;
       window.first_token += window.tokens) {
    in->launch(choices::combine_elastic, params, shape, scope);
    scope.begins();
  }
  result.event = scope.finish();
  return result;
}

ElasticReturn Buffer::begin_combine_elastic(const ElasticCombineArguments& arguments, const CallOptions& call) {
  const BufferCall in(runtime_, "begin_combine_elastic");
  const NormalMode& mode = in.normal();
  check_arguments(arguments, *runtime_);
  CallScope scope = in->begin(call);
  ElasticReturn back = scope.inside([&] { return send_back(arguments, mode, scope); });
  scope.hand_out({&back.rows, &back.beside, &back.ends});
  back.event = scope.finish();
  return back;
}

CombineResult Buffer::end_combine_elastic(const ElasticReturn& back, const CallOptions& call) {
  const BufferCall in(runtime_, "end_combine_elastic");
  static_cast<void>(in.normal());
  if (!back.rows.defined()) throw InvalidArgument("back is empty, allowed: what begin_combine_elastic returned");
  CallScope scope = in->begin(call);
  CombineResult result = sum_returned(back, *runtime_, scope);
  scope.hand_out({&back.rows, &back.beside, &back.ends});
  result.event = scope.finish();
  return result;
}

}  // namespace deep_ep
