#include "csrc/buffer/elastic/elastic.hpp"

#include <algorithm>
#include <numeric>

#include "csrc/buffer/checks.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep {
namespace {

constexpr int kMostAlignment = 1 << 20;

void check_max_tokens(std::int64_t tokens, int max_tokens, int num_ranks) {
  check_range("max_tokens", max_tokens, 1, INT32_MAX / (2 * num_ranks));
  check_range("number of tokens", tokens, 0, max_tokens);
}

void check_num_experts(int num_experts, int num_ranks) {
  if (num_experts >= num_ranks && num_experts % num_ranks == 0) return;
  fail<InvalidArgument>("num_experts is {}, allowed: multiples of the {} ranks", num_experts, num_ranks);
}

std::int64_t rounded_up(std::int64_t value, std::int64_t step) { return (value + step - 1) / step * step; }

}  // namespace

void check_elastic_dispatch(const ElasticDispatchArguments& arguments, const NormalModeSetup& setup) {
  check_sent_rows(arguments.x, arguments.x_scales, arguments.config, setup);
  check_range("num_experts", arguments.num_experts, setup.num_ranks,
              std::int64_t{setup.num_ranks} * setup.max_local_experts);
  check_num_experts(arguments.num_experts, setup.num_ranks);
  check_selections(arguments.topk_idx, arguments.topk_weights, arguments.x.size(0), setup);
  check_range("expert_alignment", arguments.expert_alignment, 1, kMostAlignment);
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
  check_range("expert_alignment", arguments.expert_alignment, 1, kMostAlignment);
  check_range("num_expanded", arguments.num_expanded, 0, INT32_MAX);
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
  check_num_experts(arguments.num_experts, ranks);
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
  if (arguments.topk_weights && arguments.expanded) {
    check_tensor("topk_weights", *arguments.topk_weights, device, {DType::float32}, {arguments.x.size(0)});
  } else if (arguments.topk_weights) {
    check_tensor("topk_weights", *arguments.topk_weights, device, {DType::float32}, {received, topk});
  }
  const auto check_bias = [&](const char* name, const std::optional<ConstTensorView>& bias) {
    if (!bias) return;
    check_tensor(name, *bias, device, {DType::bfloat16}, {tokens, arguments.x.size(1)});
    check_alignment(name, *bias);
  };
  check_bias("bias_0", arguments.bias_0);
  check_bias("bias_1", arguments.bias_1);
  check_config(arguments.config, kernels::combine_elastic::kMaxThreads / 32);
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
  return rounded_up(selections + (alignment - 1) * experts, alignment);
}

ElasticTables make_elastic_tables(const ElasticDispatchArguments& arguments, int num_ranks, std::int64_t rows,
                                  bool sent_to, std::int64_t scratch_words, const CallScope& scope) {
  const Device& device = arguments.x.device;
  const std::int64_t tokens = arguments.x.size(0), topk = arguments.topk_idx.size(1);
  const std::int64_t experts = arguments.num_experts / num_ranks;
  const auto table = [&](std::initializer_list<std::int64_t> sizes) { return unplaced(device, DType::int32, sizes); };
  std::vector<TensorView> wanted = {table({num_ranks}),    table({experts}),
                                    table({experts}),      table({rows, RowMetadata::kColumnsBefore + topk}),
                                    table({rows, topk}),   table({tokens, topk}),
                                    table({scratch_words})};
  if (sent_to) wanted.push_back(unplaced(device, DType::uint8, {tokens, num_ranks}));
  if (arguments.copy_selections) wanted.push_back(unplaced(device, arguments.topk_idx.dtype, {tokens, topk}));
  const std::vector<Tensor> made = scope.pool_tensors(wanted);
  ElasticDispatchHandle handle{.source_ends = made[0],
                               .expert_ends = made[1],
                               .expert_counts = made[2],
                               .metadata = made[3],
                               .local_topk_idx = made[4],
                               .rows_at_owners = made[5]};
  if (sent_to) handle.sent_to = made[7];
  if (arguments.copy_selections) handle.topk_idx = made.back();
  scope.hand_out(made[0]);
  const RowTables tables{.metadata = row_metadata(handle.metadata.view(), handle.source_ends.view(), device),
                         .local = handle.local_topk_idx.as<std::int32_t>(),
                         .source_ends = handle.source_ends.as<std::int32_t>(),
                         .expert_ends = handle.expert_ends.as<std::int32_t>(),
                         .expert_counts = handle.expert_counts.as<std::int32_t>(),
                         .stats = arguments.stats ? arguments.stats->as<std::int32_t>() : nullptr,
                         .rows_at_owners = handle.rows_at_owners.as<std::int32_t>(),
                         .selected = handle.topk_idx.as<std::byte>(),
                         .expand = arguments.expand};
  return {std::move(handle), tables, made[6].as<std::int32_t>()};
}

namespace {

/// `rows`: received ones, `moved`: of the layout. The scales' rows lie next to each other if `column_major_scales`.
template <class Arguments>
ElasticOutputs make_outputs(const Arguments& arguments, DType index_dtype, std::int64_t topk, std::int64_t rows,
                            std::int64_t moved, const CallScope& scope) {
  const Device& device = arguments.x.device;
  const auto& scales = arguments.x_scales;
  const bool expand = arguments.expand, column_major = arguments.column_major_scales;
  ElasticOutputs outputs;
  std::vector<TensorView> wanted;
  std::vector<Tensor*> made;
  const auto want = [&](Tensor& tensor, DType dtype, std::initializer_list<std::int64_t> shape) {
    made.push_back(&tensor);
    wanted.push_back(unplaced(device, dtype, shape));
  };
  want(outputs.x, arguments.x.dtype, {moved, arguments.x.size(1)});
  if (scales && column_major) {
    want(outputs.scales, scales->dtype, {scales->size(1), rounded_up(moved, 4)});
  } else if (scales) {
    want(outputs.scales, scales->dtype, {moved, scales->size(1)});
  }
  if (!expand) want(outputs.topk_idx, index_dtype, {rows, topk});
  if (arguments.topk_weights && expand) want(outputs.topk_weights, DType::float32, {moved});
  if (arguments.topk_weights && !expand) want(outputs.topk_weights, DType::float32, {rows, topk});
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

}  // namespace

ElasticOutputs make_elastic_outputs(const ElasticDispatchArguments& arguments, std::int64_t rows, std::int64_t moved,
                                    const CallScope& scope) {
  return make_outputs(arguments, arguments.topk_idx.dtype, arguments.topk_idx.size(1), rows, moved, scope);
}
ElasticOutputs make_elastic_outputs(const ElasticCachedDispatchArguments& arguments, int topk, std::int64_t rows,
                                    const CallScope& scope) {
  return make_outputs(arguments, arguments.index_dtype, topk, rows, arguments.expand ? arguments.num_expanded : rows,
                      scope);
}

SpreadRowsParams spreading_params(const RowsThatCame& came, const ElasticOutputs& outputs, const RowTables& tables,
                                  const std::optional<ConstTensorView>& counts, int alignment,
                                  const std::uint64_t* abort) {
  SpreadRowsParams params{};
  params.metadata = tables.metadata;
  params.expand = tables.expand;
  params.num_spread = outputs.x.size(0);
  params.abort = abort;
  params.rows = came.rows;
  params.row_bytes = came.row_bytes;
  params.spread_rows = outputs.x.as<std::byte>();
  params.local = tables.local;
  if (counts && tables.expand) {
    params.expert_counts = counts->as<std::int32_t>();
    params.num_experts = static_cast<int>(counts->size(0));
    params.alignment = alignment;
  }
  if (outputs.scales.defined()) {
    params.num_scales = static_cast<int>(outputs.scales.size(1));
    params.scales = came.scales;
    params.scale_stride = came.scale_stride;
    params.spread_scales = outputs.scales.as<std::uint32_t>();
    params.spread_stride = outputs.scales.view().stride(0);
    params.spread_column_stride = outputs.scales.view().stride(1);
  }
  if (outputs.topk_weights.defined()) {
    params.weights = came.weights;
    params.weight_stride = came.weight_stride;
    params.spread_weights = outputs.topk_weights.as<std::uint32_t>();
  }
  if (outputs.topk_idx.defined()) {
    params.spread_topk_idx = outputs.topk_idx.as<std::byte>();
    params.indices_are_64_bit = outputs.topk_idx.view().dtype == DType::int64;
  }
  return params;
}

RowTables tables_of(const ElasticCachedDispatchArguments& arguments) {
  RowTables tables{};
  tables.metadata = row_metadata(arguments.metadata, arguments.source_ends, arguments.x.device);
  tables.local = const_cast<std::int32_t*>(arguments.local_topk_idx.as<std::int32_t>());
  tables.expand = arguments.expand;
  return tables;
}

}  // namespace deep_ep
