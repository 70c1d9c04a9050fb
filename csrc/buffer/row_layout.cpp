#include "deep_ep/row_layout.hpp"

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/row_launch.hpp"
#include "csrc/buffer/row_metadata.hpp"
#include "csrc/executor/backend.hpp"
#include "csrc/support/format.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep {
namespace {

constexpr int kWarp = 32;
constexpr int kMostAlignment = 1 << 20;  // as Buffer::dispatch has it

bool is_4_bytes(const TensorSpec& tensor) { return size_of(tensor.dtype) == 4; }

/// [rows, columns] of 4 bytes, columns next to each other.
void check_words(const char* name, const ConstTensorView& tensor, const Device& device, std::int64_t rows,
                 std::int64_t columns) {
  check_strided_tensor(name, tensor, device, {}, {rows, columns});
  if (!is_4_bytes(tensor) || (tensor.size(1) > 1 && tensor.stride(1) != 1)) {
    fail<InvalidArgument>("{} is {}, allowed: elements of 4 bytes, those of a row next to each other", name,
                          tensor.describe());
  }
}

/// Where it is said how many rows are valid.
const std::int32_t* last_of(const ConstTensorView& source_ends, const Device& device) {
  check_tensor("source_ends", source_ends, device, {DType::int32}, {kAnySize});
  check_range("number of ranks in source_ends", source_ends.size(0), 1, kMaxRanks);
  return source_ends.as<std::int32_t>() + source_ends.size(0) - 1;
}

TopkIndices indices_of(const ConstTensorView& tensor) { return {tensor.data, tensor.dtype == DType::int64}; }

int most_blocks_for_numbers(const LaunchPolicy& policy) {
  return std::min(policy.multiprocessors, NumberRowsParams::kMostBlocks);
}

/// As many warps as have room for their counters.
LaunchShape shape_for_numbers(const NumberRowsParams& params, const LaunchPolicy& policy, bool on_gpu) {
  const auto bytes = [&](int warps) {
    return NumberRowsShared(Carver::without_memory(), warps, params.num_experts, params.num_ranks).bytes;
  };
  constexpr int kMostWarps = kernels::number_selections::kMaxThreads / kWarp;
  int warps = on_gpu ? kMostWarps : std::min(policy.warps_per_block, kMostWarps);
  while (warps > 1 && bytes(warps) > policy.max_shared_bytes) --warps;
  if (bytes(warps) > policy.max_shared_bytes) {
    fail<InvalidArgument>("num_local_experts is {}, allowed: as many as fit {} bytes of shared memory, {} each",
                          params.num_experts, policy.max_shared_bytes, 4 * sizeof(std::int32_t));
  }
  const std::int64_t selections =
      std::max(params.metadata.num_rows, params.num_tokens) * std::max(params.metadata.num_topk, 1);
  const std::int64_t wanted = (selections + warps * kWarp - 1) / (warps * kWarp);
  const auto blocks = static_cast<int>(std::clamp<std::int64_t>(wanted, 1, most_blocks_for_numbers(policy)));
  return {blocks, warps * kWarp, bytes(warps)};
}

/// That count the rows for each rank.
int counting_blocks(const LaunchPolicy& policy, std::int64_t rows) {
  if (rows <= AddressRowsParams::kRowsForOneBlock) return 1;
  return std::min(policy.multiprocessors, AddressRowsParams::kMostCountingBlocks);
}

}  // namespace

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
          .num_valid = last_of(source_ends, device)};
}

std::int64_t number_rows_scratch(const std::shared_ptr<Executor>& executor, int num_local_experts) {
  return std::int64_t{most_blocks_for_numbers(executor->policy())} * num_local_experts;
}

void number_rows(const std::shared_ptr<Executor>& executor, const RowNumbering& call, StreamHandle stream) {
  const auto backend = backend_of(executor);
  const Device device = backend->device();
  check_tensor("recv_topk_idx", call.recv_topk_idx, device, {DType::int32, DType::int64}, {kAnySize, kAnySize});
  const std::int64_t rows = call.recv_topk_idx.size(0), topk = call.recv_topk_idx.size(1);
  check_range("width of recv_topk_idx", topk, 0, kMaxTopk);
  check_tensor("topk_idx", call.topk_idx, device, {DType::int32, DType::int64}, {kAnySize, topk});
  const std::int64_t tokens = call.topk_idx.size(0), experts = call.num_local_experts;
  check_tensor("rank_prefix_matrix", call.rank_prefix_matrix, device, {DType::int32}, {kAnySize, kAnySize});
  const std::int64_t ranks = call.rank_prefix_matrix.size(0);
  check_range("number of ranks in rank_prefix_matrix", ranks, 1, kMaxRanks);
  check_range("rank", call.rank, 0, ranks - 1);
  check_range("num_local_experts", experts, 1, INT32_MAX / ranks);
  check_range("max_tokens", call.max_tokens, 1, INT32_MAX);
  check_range("alignment", call.alignment, 1, kMostAlignment);
  const auto check = [&](const char* name, const ConstTensorView& tensor, std::initializer_list<std::int64_t> shape) {
    check_tensor(name, tensor, device, {DType::int32}, shape);
  };
  check("rank_prefix_matrix", call.rank_prefix_matrix, {ranks, ranks});
  check("recv_src_idx", call.recv_src_idx, {rows});
  check("destination_row", call.destination_row, {tokens, ranks});
  check("source_ends", call.source_ends, {ranks});
  check("expert_ends", call.expert_ends, {experts});
  check("expert_counts", call.expert_counts, {experts});
  if (call.stats) check("stats", *call.stats, {experts});
  check("metadata", call.metadata, {rows, RowMetadata::kColumnsBefore + topk});
  check("local", call.local, {rows, topk});
  check("rows_at_owners", call.rows_at_owners, {tokens, topk});
  if (call.selected) check_tensor("selected", *call.selected, device, {call.topk_idx.dtype}, {tokens, topk});
  check("scratch", call.scratch, {number_rows_scratch(executor, call.num_local_experts)});

  NumberRowsParams params{};
  params.metadata = row_metadata(call.metadata, call.source_ends, device);
  params.recv_topk_idx = indices_of(call.recv_topk_idx);
  params.source = call.recv_src_idx.as<std::int32_t>();
  params.ends = call.rank_prefix_matrix.as<std::int32_t>() + call.rank;
  params.ends_stride = ranks;
  params.num_ranks = static_cast<int>(ranks);
  params.num_experts = call.num_local_experts;
  params.max_tokens = call.max_tokens;
  params.alignment = call.alignment;
  params.expand = call.expand;
  const bool few = rows * topk <= NumberRowsParams::kFewSelections;
  params.block_counts = few ? nullptr : call.scratch.as<std::int32_t>();
  params.source_ends = call.source_ends.as<std::int32_t>();
  params.expert_ends = call.expert_ends.as<std::int32_t>();
  params.expert_counts = call.expert_counts.as<std::int32_t>();
  params.stats = call.stats ? call.stats->as<std::int32_t>() : nullptr;
  params.local = call.local.as<std::int32_t>();
  params.topk_idx = indices_of(call.topk_idx);
  params.num_tokens = tokens;
  params.destination_row = call.destination_row.as<std::int32_t>();
  params.rows_at_owners = call.rows_at_owners.as<std::int32_t>();
  params.selected = call.selected ? call.selected->as<std::byte>() : nullptr;
  const LaunchShape shape = shape_for_numbers(params, backend->policy(), device.kind == Device::Kind::cuda);
  backend->make_current();
  if (!few) {
    backend->kernels().count_selections(
        params, {shape.blocks, shape.threads, static_cast<std::size_t>(experts) * sizeof(std::int32_t)}, stream);
  }
  backend->kernels().number_selections(params, shape, stream);
}

void spread_rows(const std::shared_ptr<Executor>& executor, const RowSpreading& call, StreamHandle stream) {
  const auto backend = backend_of(executor);
  const Device device = backend->device();
  SpreadRowsParams params{};
  params.expand = call.metadata.has_value();
  if (params.expand) {
    params.metadata = row_metadata(*call.metadata, call.source_ends, device);
    params.num_spread = -1;  // the first result says how many
  } else if (!call.local) {
    fail<InvalidArgument>("metadata and local are not given, allowed: one of them");
  } else {
    check_tensor("local", *call.local, device, {DType::int32}, {kAnySize, kAnySize});
    check_range("width of local", call.local->size(1), 0, kMaxTopk);
    params.local = call.local->as<std::int32_t>();
    params.metadata.num_rows = params.num_spread = call.local->size(0);
    params.metadata.num_topk = static_cast<int>(call.local->size(1));
    params.metadata.num_valid = last_of(call.source_ends, device);
  }
  const std::int64_t rows = params.metadata.num_rows, topk = params.metadata.num_topk;
  const auto enough_rows = [&](const char* name, const ConstTensorView& tensor) {
    if (tensor.size(0) >= rows) return;
    fail<InvalidArgument>("{} is {}, allowed: {} rows or more", name, tensor.describe(), rows);
  };
  const auto take_rows = [&](const char* name, const TensorView& result) {
    if (params.num_spread < 0) params.num_spread = result.size(0);
    if (result.dims != 0 && result.size(0) == params.num_spread) return;
    fail<InvalidArgument>("{} is {}, allowed: {} rows", name, result.describe(), params.num_spread);
  };
  const auto come_together = [](const char* name, bool first, bool second) {
    if (first != second) fail<InvalidArgument>("{0} and spread_{0}: one is given, allowed: both or none", name);
  };

  come_together("rows", call.rows.has_value(), call.spread_rows.has_value());
  if (call.rows) {
    check_tensor("rows", *call.rows, device, {}, {kAnySize, kAnySize});
    enough_rows("rows", *call.rows);
    check_row_bytes("rows", *call.rows);
    check_tensor("spread_rows", *call.spread_rows, device, {call.rows->dtype}, {kAnySize, call.rows->size(1)});
    check_alignment("spread_rows", *call.spread_rows);
    take_rows("spread_rows", *call.spread_rows);
    params.rows = call.rows->as<std::byte>();
    params.spread_rows = call.spread_rows->as<std::byte>();
    params.row_bytes = static_cast<std::uint32_t>(call.rows->size(1) * static_cast<int>(size_of(call.rows->dtype)));
  }
  come_together("scales", call.scales.has_value(), call.spread_scales.has_value());
  if (call.scales) {
    check_words("scales", *call.scales, device, kAnySize, kAnySize);
    enough_rows("scales", *call.scales);
    check_strided_tensor("spread_scales", *call.spread_scales, device, {}, {kAnySize, call.scales->size(1)});
    if (!is_4_bytes(*call.spread_scales)) {
      fail<InvalidArgument>("spread_scales is {}, allowed: elements of 4 bytes", call.spread_scales->describe());
    }
    take_rows("spread_scales", *call.spread_scales);
    params.scales = call.scales->as<std::uint32_t>();
    params.scale_stride = call.scales->stride(0);
    params.num_scales = static_cast<int>(call.scales->size(1));
    params.spread_scales = call.spread_scales->as<std::uint32_t>();
    params.spread_stride = call.spread_scales->stride(0);
    params.spread_column_stride = call.spread_scales->stride(1);
  }
  come_together("weights", call.weights.has_value(), call.spread_weights.has_value());
  if (call.weights) {
    check_words("weights", *call.weights, device, kAnySize, topk);
    enough_rows("weights", *call.weights);
    if (params.expand) {
      check_tensor("spread_weights", *call.spread_weights, device, {DType::float32}, {kAnySize});
      take_rows("spread_weights", *call.spread_weights);
    } else {
      check_tensor("spread_weights", *call.spread_weights, device, {DType::float32}, {rows, topk});
    }
    params.weights = call.weights->as<std::uint32_t>();
    params.weight_stride = call.weights->stride(0);
    params.spread_weights = call.spread_weights->as<std::uint32_t>();
  }
  if (call.spread_topk_idx) {
    if (params.expand) fail<InvalidArgument>("spread_topk_idx is given, allowed: only without metadata");
    check_tensor("spread_topk_idx", *call.spread_topk_idx, device, {DType::int32, DType::int64}, {rows, topk});
    params.spread_topk_idx = call.spread_topk_idx->as<std::byte>();
    params.indices_are_64_bit = call.spread_topk_idx->dtype == DType::int64;
  }
  std::int64_t gap_units = 0;
  if (call.expert_counts) {
    if (!params.expand) fail<InvalidArgument>("expert_counts is given, allowed: only with metadata");
    check_tensor("expert_counts", *call.expert_counts, device, {DType::int32}, {kAnySize});
    check_range("alignment", call.alignment, 1, kMostAlignment);
    params.expert_counts = call.expert_counts->as<std::int32_t>();
    params.num_experts = static_cast<int>(call.expert_counts->size(0));
    params.alignment = call.alignment;
    gap_units = call.expert_counts->size(0);
  }

  const LaunchShape shape = shape_for_pipelines(rows + gap_units, params.row_bytes, backend->policy(),
                                                kernels::spread_rows::kMaxThreads, params.stages, params.stage_bytes);
  backend->make_current();
  backend->kernels().spread_rows(params, shape, stream);
}

void sum_expanded_rows(const std::shared_ptr<Executor>& executor, const ConstTensorView& rows,
                       const ConstTensorView& metadata, const ConstTensorView& source_ends, const TensorView& sums,
                       StreamHandle stream) {
  const auto backend = backend_of(executor);
  const Device device = backend->device();
  check_tensor("rows", rows, device, {DType::bfloat16}, {kAnySize, kAnySize});
  check_row_bytes("rows", rows);
  const RowMetadata slots = row_metadata(metadata, source_ends, device);
  check_tensor("sums", sums, device, {DType::bfloat16}, {slots.num_rows, rows.size(1)});
  check_alignment("sums", sums);
  if (slots.num_rows == 0) return;

  SumRowsParams params{};
  params.rows = rows.as<std::byte>();
  params.num_rows = rows.size(0);
  params.metadata = slots;
  params.sums = sums.as<std::byte>();
  params.row_bytes = static_cast<std::uint32_t>(rows.size(1) * 2);
  const std::int64_t pieces = pieces_of_sums(slots.num_rows, params.row_bytes);
  backend->make_current();
  backend->kernels().sum_rows(params, shape_for_warps(pieces, backend->policy(), kernels::sum_rows::kMaxThreads),
                              stream);
}

std::int64_t address_rows_scratch(const std::shared_ptr<Executor>& executor, std::int64_t rows, int num_ranks) {
  const int blocks = counting_blocks(executor->policy(), rows);
  return blocks == 1 ? 0 : std::int64_t{blocks} * num_ranks;
}

void address_rows(const std::shared_ptr<Executor>& executor, const RowAddressing& call, StreamHandle stream) {
  const auto backend = backend_of(executor);
  const Device device = backend->device();
  AddressRowsParams params{};
  params.metadata = row_metadata(call.metadata, call.source_ends, device);
  const std::int64_t rows = params.metadata.num_rows, topk = params.metadata.num_topk;
  const std::int64_t ranks = call.source_ends.size(0);
  const std::int64_t sent = call.each_selection ? call.is_token_in_rank.size(0) : rows;
  check_range("max_tokens", call.max_tokens, 1, INT32_MAX);
  check_tensor("is_token_in_rank", call.is_token_in_rank, device, {DType::boolean, DType::uint8}, {sent, ranks});
  check_tensor("num_tokens_per_rank", call.num_tokens_per_rank, device, {DType::int32}, {ranks});
  check_tensor("beside", call.beside, device, {DType::int32}, {sent, call.weights ? 1 + topk : 1});
  if (call.weights) {
    if (call.each_selection) fail<InvalidArgument>("weights is given, allowed: only without each_selection");
    params.weights_of_slots = call.weights->dims == 1;
    if (params.weights_of_slots) {
      check_tensor("weights", *call.weights, device, {DType::float32}, {kAnySize});
    } else {
      check_tensor("weights", *call.weights, device, {DType::float32}, {rows, topk});
    }
    params.weights = call.weights->as<float>();
    params.num_weights = call.weights->size(0);
  }
  params.num_ranks = static_cast<int>(ranks);
  params.max_tokens = call.max_tokens;
  params.each_selection = call.each_selection;
  params.num_sent = sent;
  params.beside = call.beside.as<std::int32_t>();
  params.columns = static_cast<int>(call.beside.size(1));
  params.is_token_in_rank = call.is_token_in_rank.as<std::uint8_t>();
  params.num_tokens_per_rank = call.num_tokens_per_rank.as<std::int32_t>();
  const LaunchPolicy& policy = backend->policy();
  LaunchShape shape = shape_for_warps(rows, policy, kernels::address_rows::kMaxThreads);
  shape.shared_bytes = static_cast<std::size_t>(ranks) * sizeof(std::int32_t);
  params.counting_blocks = std::min(counting_blocks(policy, rows), shape.blocks);
  if (const std::int64_t scratch = address_rows_scratch(executor, rows, params.num_ranks); scratch != 0) {
    if (!call.scratch) fail<InvalidArgument>("scratch is not given, allowed: int32[{}] for {} rows", scratch, rows);
    check_tensor("scratch", *call.scratch, device, {DType::int32}, {scratch});
    params.block_counts = call.scratch->as<std::int32_t>();
  }
  backend->make_current();
  backend->kernels().address_rows(params, shape, stream);
  if (params.counting_blocks > 1) {
    backend->kernels().add_row_counts(
        params, shape_for_warps(params.num_ranks, policy, kernels::add_row_counts::kMaxThreads), stream);
  }
}

void sum_returned_rows(const std::shared_ptr<Executor>& executor, const RowReturn& call, StreamHandle stream) {
  const auto backend = backend_of(executor);
  const Device device = backend->device();
  check_tensor("rows", call.rows, device, {DType::bfloat16}, {kAnySize, kAnySize});
  check_row_bytes("rows", call.rows);
  check_tensor("topk_idx", call.topk_idx, device, {DType::int32, DType::int64}, {kAnySize, kAnySize});
  const std::int64_t tokens = call.topk_idx.size(0), topk = call.topk_idx.size(1);
  check_range("width of topk_idx", topk, 0, kMaxTopk);
  check_range("number of selections", tokens * topk, 0, INT32_MAX);
  check_words("beside", call.beside, device, call.rows.size(0), call.weights ? 1 + topk : kAnySize);
  check_range("width of beside", call.beside.size(1), 1, 1 + kMaxTopk);
  check_tensor("rank_prefix_matrix", call.rank_prefix_matrix, device, {DType::int32}, {kAnySize, kAnySize});
  const std::int64_t ranks = call.rank_prefix_matrix.size(0);
  check_range("number of ranks in rank_prefix_matrix", ranks, 1, kMaxRanks);
  check_tensor("rank_prefix_matrix", call.rank_prefix_matrix, device, {DType::int32}, {ranks, ranks});
  check_range("rank", call.rank, 0, ranks - 1);
  check_range("num_local_experts", call.num_local_experts, 1, INT32_MAX);
  const auto check_sums = [&](const char* name, const ConstTensorView& tensor) {
    check_tensor(name, tensor, device, {DType::bfloat16}, {tokens, call.rows.size(1)});
    check_alignment(name, tensor);
  };
  if (call.bias_0) check_sums("bias_0", *call.bias_0);
  if (call.bias_1) check_sums("bias_1", *call.bias_1);
  check_sums("sums", call.sums);
  if (call.weights) check_tensor("weights", *call.weights, device, {DType::float32}, {tokens, topk});
  check_tensor("scratch", call.scratch, device, {DType::int32}, {tokens, topk});
  if (tokens == 0) return;

  ReturnedRowsParams params{};
  params.rows = call.rows.as<std::byte>();
  params.num_rows = call.rows.size(0);
  params.num_valid = call.rank_prefix_matrix.as<std::int32_t>() + (ranks - 1) * ranks + call.rank;
  params.beside = call.beside.as<std::int32_t>();
  params.beside_stride = call.beside.stride(0);
  params.topk_idx = indices_of(call.topk_idx);
  params.num_tokens = tokens;
  params.num_topk = static_cast<int>(topk);
  params.num_experts = call.num_local_experts;
  params.each_selection = call.each_selection;
  params.bias[0] = call.bias_0 ? call.bias_0->as<std::byte>() : nullptr;
  params.bias[1] = call.bias_1 ? call.bias_1->as<std::byte>() : nullptr;
  params.sums = call.sums.as<std::byte>();
  params.row_bytes = static_cast<std::uint32_t>(call.rows.size(1) * 2);
  params.weights = call.weights ? call.weights->as<std::int32_t>() : nullptr;
  params.row_of = call.scratch.as<std::int32_t>();
  const LaunchPolicy& policy = backend->policy();
  backend->make_current();
  backend->kernels().find_returned_rows(
      params, shape_for_warps((params.num_rows + kWarp - 1) / kWarp, policy, kernels::find_returned_rows::kMaxThreads),
      stream);
  backend->kernels().sum_returned_rows(
      params,
      shape_for_warps(pieces_of_sums(tokens, params.row_bytes), policy, kernels::sum_returned_rows::kMaxThreads),
      stream);
}

}  // namespace deep_ep
