// Combine of the second interface as a dispatch of the rows back to their tokens, and sums of what came: between nodes,
// and where the biases are read later than the call.
#include <algorithm>

#include "csrc/buffer/elastic/elastic.hpp"
#include "csrc/executor/kernel_table.hpp"

namespace deep_ep {
namespace {

/// Enqueues a kernel with a warp for each unit of work, as far as the device has room for warps that have no shared
/// memory.
template <class Params>
void launch(const KernelChoice<Params>& kernel, const Params& params, std::int64_t units, const Backend& executor,
            const CallScope& scope) {
  constexpr int kBlocksOfMultiprocessor = 8;
  if (units == 0) return;
  const LaunchPolicy& policy = executor.policy();
  const int warps = std::min(policy.warps_per_block, kernel.max_threads / 32);
  const std::int64_t most = std::int64_t{policy.multiprocessors} * kBlocksOfMultiprocessor;
  const int blocks = static_cast<int>(std::min((units + warps - 1) / warps, most));
  (executor.kernels().*kernel.launcher)(params, {blocks, warps * 32, 0}, scope.stream());
}

/// How many warps have something to add to so many sums of rows.
std::int64_t pieces_of_sums(std::int64_t sums, std::int64_t row_bytes) {
  constexpr std::int64_t kBytesOfWarp = 512;
  return sums * ((row_bytes + kBytesOfWarp - 1) / kBytesOfWarp);
}

void hand_out_return(const ElasticReturn& back, const CallScope& scope) {
  for (const Tensor* tensor : {&back.rows, &back.beside, &back.ends}) scope.hand_out(*tensor);
}

}  // namespace

ElasticReturn NormalMode::send_back(const ElasticCombineArguments& arguments, CallScope& scope) {
  const Device device = runtime_.device();
  const Backend& executor = *runtime_.executor();
  const RowMetadata metadata = row_metadata(arguments.metadata, arguments.source_ends, device);
  DispatchArguments back;
  back.x = arguments.x;
  Tensor sums;
  if (arguments.expanded && !arguments.each_selection) {
    sums = scope.pool_tensor(unplaced(device, DType::bfloat16, {metadata.num_rows, arguments.x.size(1)}));
    SumRowsParams params{};
    params.rows = arguments.x.as<std::byte>();
    params.num_rows = arguments.x.size(0);
    params.metadata = metadata;
    params.sums = sums.as<std::byte>();
    params.row_bytes = static_cast<std::uint32_t>(arguments.x.size(1) * 2);
    launch(choices::sum_rows, params, pieces_of_sums(metadata.num_rows, params.row_bytes), executor, scope);
    back.x = sums.view();
  }

  const std::int64_t sent = back.x.size(0);
  check_token_count("number of rows in x", sent, runtime_.num_ranks());
  const int ranks = runtime_.num_ranks(), columns = arguments.topk_weights ? 1 + metadata.num_topk : 1;
  Tensor counts, is_sent, beside;
  WantedTensors tables(device);
  tables.add(counts, DType::int32, {ranks});
  tables.add(is_sent, DType::boolean, {sent, ranks});
  tables.add(beside, DType::int32, {sent, columns});
  tables.place_in_pool(scope);
  const auto before = static_cast<std::size_t>(is_sent.as<std::byte>() - counts.as<std::byte>());
  runtime_.executor()->fill(counts.data(), 0, before + is_sent.view().bytes(), scope.stream());
  AddressRowsParams params{};
  params.metadata = metadata;
  params.num_ranks = ranks;
  params.max_tokens = arguments.max_tokens;
  params.each_selection = arguments.each_selection;
  params.num_sent = sent;
  if (arguments.topk_weights) {
    params.weights = arguments.topk_weights->as<float>();
    params.weights_of_slots = arguments.expanded;
    params.num_weights = arguments.topk_weights->size(0);
  }
  params.is_token_in_rank = is_sent.as<std::uint8_t>();
  params.beside = beside.as<std::int32_t>();
  params.columns = columns;
  launch(choices::address_rows, params, metadata.num_rows, executor, scope);

  back.x_scales = beside.view();
  back.num_tokens_per_expert = counts.view();
  back.is_token_in_rank = is_sent.view();
  back.num_worst_tokens = std::int64_t{arguments.max_tokens} *
                          (arguments.each_selection ? metadata.num_topk : std::min(metadata.num_topk, ranks));
  back.num_sms = arguments.num_sms;
  const DispatchResult came = dispatch(back, scope);
  return {.arguments = arguments,
          .rows = came.recv_x,
          .beside = *came.recv_x_scales,
          .ends = came.handle.rank_prefix_matrix};
}

CombineResult sum_returned(const ElasticReturn& back, Runtime& runtime, const CallScope& scope) {
  const ElasticCombineArguments& arguments = back.arguments;
  const ConstTensorView& topk_idx = arguments.topk_idx;
  const std::int64_t tokens = topk_idx.size(0), topk = topk_idx.size(1), width = back.ends.size(1);
  const Tensor row_of = scope.pool_tensor(unplaced(runtime.device(), DType::int32, {tokens, topk}));
  CombineResult result = make_sums(back.rows.view(), tokens, arguments.topk_weights ? topk : 0, scope);
  SumRowsParams params{};
  params.rows = back.rows.as<std::byte>();
  params.num_rows = back.rows.size(0);
  set_biases(params, arguments);
  params.sums = result.combined_x.as<std::byte>();
  params.row_bytes = static_cast<std::uint32_t>(back.rows.size(1) * 2);
  params.returned = {
      .beside = back.beside.as<std::int32_t>(),
      .beside_stride = back.beside.size(1),
      .num_valid = back.ends.as<std::int32_t>() + (runtime.num_ranks() - 1) * width + runtime.rank() % width,
      .topk_idx = indices_of(topk_idx),
      .num_tokens = tokens,
      .num_topk = static_cast<int>(topk),
      .num_experts = arguments.num_experts / runtime.num_ranks(),
      .each_selection = arguments.each_selection,
      .weights = memory_of<std::int32_t>(result.combined_topk_weights),
      .row_of = row_of.as<std::int32_t>()};
  const Backend& executor = *runtime.executor();
  if (tokens != 0) launch(choices::find_returned_rows, params, (params.num_rows + 31) / 32, executor, scope);
  launch(choices::sum_rows, params, pieces_of_sums(tokens, params.row_bytes), executor, scope);
  return result;
}

ElasticReturn Buffer::begin_combine_elastic(const ElasticCombineArguments& arguments, const CallOptions& call) {
  const BufferCall in(runtime_, "begin_combine_elastic");
  NormalMode& mode = in.normal();
  check_elastic_combine(arguments, *runtime_);
  CallScope scope = in->begin(call);
  ElasticReturn back = scope.inside([&] { return mode.send_back(arguments, scope); });
  hand_out_return(back, scope);
  back.event = scope.finish();
  return back;
}

CombineResult Buffer::end_combine_elastic(const ElasticReturn& back, const CallOptions& call) {
  const BufferCall in(runtime_, "end_combine_elastic");
  static_cast<void>(in.normal());
  if (!back.rows.defined()) throw InvalidArgument("back is empty, allowed: what begin_combine_elastic returned");
  CallScope scope = in->begin(call);
  CombineResult result = sum_returned(back, *runtime_, scope);
  hand_out_return(back, scope);
  result.event = scope.finish();
  return result;
}

}  // namespace deep_ep
