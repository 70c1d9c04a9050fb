#include "csrc/buffer/elastic/elastic.hpp"

#include <algorithm>
#include <numeric>

#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep {
namespace {

constexpr int kMostAlignment = 1 << 20;

}  // namespace

void check_elastic_dispatch(const ElasticDispatchArguments& arguments, const DispatchArguments& sent,
                            const Runtime& runtime) {
  check_sent_rows(sent, runtime);
  const Device& device = runtime.device();
  const int ranks = runtime.num_ranks();
  const std::int64_t tokens = arguments.x.size(0);
  check_range("expert_alignment", arguments.expert_alignment, 1, kMostAlignment);
  check_range("max_tokens", arguments.max_tokens, 1, INT32_MAX / (2 * ranks));
  check_range("number of tokens", tokens, 0, arguments.max_tokens);
  check_experts("num_experts", arguments.num_experts, ranks, runtime.options().max_local_experts);
  check_selections(sent, runtime);
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

void check_elastic_combine(const ElasticCombineArguments& arguments, const Runtime& runtime) {
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
  check_tensor("rows_at_owners", arguments.rows_at_owners, device, {DType::int32}, {tokens, topk});
  const std::int64_t received = arguments.metadata.size(0);
  if (!arguments.expanded && arguments.x.size(0) != received) {
    fail<InvalidArgument>("x has {} rows, allowed: the {} of metadata", arguments.x.size(0), received);
  }
  if (arguments.each_selection && !arguments.expanded) {
    fail<InvalidArgument>("each_selection is true, allowed: only with expanded");
  }
  if (arguments.topk_weights && arguments.each_selection) {
    fail<InvalidArgument>("topk_weights is given, allowed: only without each_selection");
  }
  if (const auto& weights = arguments.topk_weights) {
    arguments.expanded ? check_tensor("topk_weights", *weights, device, {DType::float32}, {arguments.x.size(0)})
                       : check_tensor("topk_weights", *weights, device, {DType::float32}, {received, topk});
  }
  check_biases(arguments, tokens, runtime);
  check_sms(arguments.num_sms);
}

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

std::int64_t expanded_rows(const ElasticDispatchArguments& arguments, int num_ranks, const std::vector<int>& counts) {
  if (arguments.exact) return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
  // A token may name an expert more than once: also where there are fewer experts than selections.
  const std::int64_t alignment = arguments.expert_alignment, experts = arguments.num_experts / num_ranks;
  const std::int64_t selections = std::int64_t{num_ranks} * arguments.max_tokens * arguments.topk_idx.size(1);
  return align_up(selections + (alignment - 1) * experts, alignment);
}

std::size_t fit_window(TokenWindow& window, std::size_t at, const Runtime& runtime) {
  const auto ranks = static_cast<std::size_t>(runtime.num_ranks());
  const std::size_t beside = ranks * window.words_beside * sizeof(std::uint32_t);
  const std::size_t token = static_cast<std::size_t>(window.parts) * window.row_stride + beside;
  const std::size_t used = at + kLine - runtime.layout().window_at();
  const std::size_t room = runtime.layout().window_bytes - std::min(runtime.layout().window_bytes, used);
  const auto most = static_cast<std::size_t>(window.max_tokens);
  window.tokens = static_cast<std::int32_t>(token == 0 ? most : std::min(room / token, most));
  window.beside_at = at;
  window.rows_at = align_to_line(at + static_cast<std::size_t>(window.tokens) * beside);
  return token;
}

NumberingParams numbering_params(const ElasticDispatchArguments& arguments, const Runtime& runtime) {
  NumberingParams params{};
  params.rank = runtime.rank();
  params.num_ranks = runtime.num_ranks();
  params.num_experts = arguments.num_experts / runtime.num_ranks();
  params.max_tokens = arguments.max_tokens;
  params.alignment = arguments.expert_alignment;
  params.metadata.num_topk = static_cast<int>(arguments.topk_idx.size(1));
  params.clear_tail = !arguments.exact;
  return params;
}

std::size_t fit_numbering(NumberingParams& params, bool of_all_ranks, std::int64_t selections, int most_blocks,
                          std::size_t room) {
  constexpr std::int64_t kOfBlock = 2048;
  // Few selections are numbered by several blocks: on two H100 128 tokens took 1.5 us longer than one token with 8
  // blocks, and 7.7 us longer with one.
  constexpr std::int64_t kFewOfBlock = 256, kFewBlocks = 8;
  const auto blocks_of = [&](std::int64_t each) { return (selections + each - 1) / each; };
  const std::int64_t useful = std::max(blocks_of(kOfBlock), std::min(kFewBlocks, blocks_of(kFewOfBlock)));
  params.blocks = static_cast<int>(std::max<std::int64_t>(1, std::min<std::int64_t>(useful, most_blocks)));
  const auto bytes = [&] { return NumberingShared(Carver::without_memory(), params, of_all_ranks).bytes; };
  while (params.warps > 1 && bytes() > room) --params.warps;
  if (bytes() > room) {
    fail<InvalidArgument>("num_experts is {}, allowed: so many that the {} of each rank fit {} bytes of shared memory",
                          params.num_experts * params.num_ranks, params.num_experts, room);
  }
  return bytes();
}

ElasticDispatchHandle make_elastic_tables(const ElasticDispatchArguments& arguments, std::int64_t rows, bool in_node,
                                          NumberingParams& numbers, KernelState& state, const CallScope& scope) {
  const std::int64_t tokens = arguments.x.size(0), topk = arguments.topk_idx.size(1);
  const std::int64_t ranks = numbers.num_ranks, experts = numbers.num_experts;
  ElasticDispatchHandle handle;
  Tensor counts;
  WantedTensors wanted(arguments.x.device);
  wanted.add(handle.source_ends, DType::int32, {ranks});
  wanted.add(handle.expert_ends, DType::int32, {experts});
  wanted.add(handle.expert_counts, DType::int32, {experts});
  wanted.add(handle.metadata, DType::int32, {rows, RowMetadata::kColumnsBefore + topk});
  wanted.add(handle.local_topk_idx, DType::int32, {rows, topk});
  wanted.add(handle.rows_at_owners, DType::int32, {tokens, topk});
  wanted.add(counts, DType::int32, {numbers.blocks, numbers.columns(in_node)});
  if (arguments.copy_selections) wanted.add(handle.topk_idx, arguments.topk_idx.dtype, {tokens, topk});
  wanted.place_in_pool(scope);
  scope.hand_out(handle.source_ends);
  const ConstTensorView ends = handle.source_ends.view();
  static_cast<RowTables&>(numbers) = {.metadata = row_metadata(handle.metadata.view(), ends, ends.device),
                                      .local = handle.local_topk_idx.as<std::int32_t>(),
                                      .source_ends = handle.source_ends.as<std::int32_t>(),
                                      .expert_ends = handle.expert_ends.as<std::int32_t>(),
                                      .expert_counts = handle.expert_counts.as<std::int32_t>(),
                                      .stats = memory_of<std::int32_t>(arguments.stats),
                                      .rows_at_owners = handle.rows_at_owners.as<std::int32_t>(),
                                      .selected = handle.topk_idx.as<std::byte>(),
                                      .expand = arguments.expand};
  numbers.exchange = {counts.as<std::int32_t>(), &state.selections_ticket, &state.selections_counted};
  return handle;
}

/// The scales' rows lie next to each other if `column_major_scales`.
void make_elastic_results(ElasticDispatchResult& results, const ElasticDispatchArguments& arguments,
                          const ElasticDispatchHandle& handle, const CallScope& scope) {
  const auto& scales = arguments.x_scales;
  const bool expand = arguments.expand, column_major = arguments.column_major_scales;
  const std::int64_t rows = handle.metadata.size(0), moved = expand ? handle.num_expanded : rows;
  const std::int64_t topk = handle.metadata.size(1) - RowMetadata::kColumnsBefore;
  WantedTensors wanted(arguments.x.device);
  wanted.add(results.recv_x, arguments.x.dtype, {moved, arguments.x.size(1)});
  if (scales && column_major) {
    wanted.add(results.recv_x_scales.emplace(), scales->dtype, {scales->size(1), align_up(moved, 4)});
  } else if (scales) {
    wanted.add(results.recv_x_scales.emplace(), scales->dtype, {moved, scales->size(1)});
  }
  if (!expand) wanted.add(results.recv_topk_idx.emplace(), arguments.topk_idx.dtype, {rows, topk});
  if (arguments.topk_weights && expand) wanted.add(results.recv_topk_weights.emplace(), DType::float32, {moved});
  if (arguments.topk_weights && !expand) wanted.add(results.recv_topk_weights.emplace(), DType::float32, {rows, topk});
  wanted.place(scope.results(wanted.pieces()));
  if (scales && column_major) {
    TensorView turned = results.recv_x_scales->view();
    turned.shape = {moved, scales->size(1)};
    turned.strides = {1, align_up(moved, 4)};
    results.recv_x_scales = Tensor(turned, results.recv_x_scales->storage());
  }
}

void spread_to(const ElasticDispatchResult& results, const ElasticDispatchArguments& arguments,
               const ElasticDispatchHandle& handle, SpreadRowsParams& params) {
  params.metadata = row_metadata(handle.metadata.view(), handle.source_ends.view(), arguments.x.device);
  params.expand = arguments.expand;
  params.num_spread = results.recv_x.size(0);
  params.spread_rows = results.recv_x.as<std::byte>();
  params.local = handle.local_topk_idx.as<std::int32_t>();
  if (arguments.zero_padding && arguments.expand) {
    params.expert_ends = handle.expert_ends.as<std::int32_t>();
    params.num_experts = static_cast<int>(handle.expert_ends.size(0));
    params.alignment = arguments.expert_alignment;
  }
  if (const auto& scales = results.recv_x_scales) {
    params.num_scales = static_cast<int>(scales->size(1));
    params.spread_scales = scales->as<std::uint32_t>();
    params.spread_stride = scales->view().stride(0);
    params.spread_column_stride = scales->view().stride(1);
  } else {
    params.scales = nullptr;
  }
  params.spread_weights = memory_of<std::uint32_t>(results.recv_topk_weights);
  if (params.spread_weights == nullptr) params.weights = nullptr;
  if (results.recv_topk_idx) {
    params.spread_topk_idx = results.recv_topk_idx->as<std::byte>();
    params.indices_are_64_bit = arguments.topk_idx.dtype == DType::int64;
  }
}

LaunchShape plan_spreading(SpreadRowsParams& params, const LaunchPolicy& policy) {
  // A block for each multiprocessor, or for each of few rows and gaps: its warps share all shared memory.
  const int warps = std::min(policy.warps_per_block, kernels::spread_rows::kMaxThreads / 32);
  const std::int64_t units = params.metadata.num_rows + params.num_experts;
  const std::size_t shared_bytes = plan_stages(params.pipe, warps, params.row_bytes, policy.max_shared_bytes, [&] {
    return WarpStages(Carver::without_memory(), warps, params.pipe).bytes;
  });
  return {static_cast<int>(std::clamp<std::int64_t>(units, 1, policy.multiprocessors)), warps * 32, shared_bytes};
}

}  // namespace deep_ep
