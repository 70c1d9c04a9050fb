// Launches of the kernels that number, move, address and add up rows within a device's memory.
#include <algorithm>

#include "csrc/buffer/elastic/elastic.hpp"
#include "csrc/buffer/row_launch.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep {

NumberingPlan plan_numbering(const NumberRowsParams& params, const LaunchPolicy& policy, bool on_gpu) {
  const auto bytes = [&](int warps) {
    return NumberingShared(Carver::without_memory(), warps, params.num_experts, params.num_experts, params.num_ranks)
        .bytes;
  };
  constexpr int kMostWarps = kernels::number_selections::kMaxThreads / 32;
  // As many warps as have room for their counters.
  int warps = on_gpu ? kMostWarps : std::min(policy.warps_per_block, kMostWarps);
  while (warps > 1 && bytes(warps) > policy.max_shared_bytes) --warps;
  if (bytes(warps) > policy.max_shared_bytes) {
    fail<InvalidArgument>("num_local_experts is {}, allowed: as many as fit {} bytes of shared memory, {} each",
                          params.num_experts, policy.max_shared_bytes, 4 * sizeof(std::int32_t));
  }
  constexpr std::int64_t kSelectionsOfWarp = 128;  // fewer would make more blocks wait for each other
  const std::int64_t rows = std::max(params.metadata.num_rows, params.num_tokens);
  const std::int64_t of_block = kSelectionsOfWarp * warps;
  const auto blocks =
      static_cast<int>(std::clamp<std::int64_t>((rows * params.metadata.num_topk + of_block - 1) / of_block, 1,
                                                std::min(policy.multiprocessors, NumberRowsParams::kMostBlocks)));
  return {{blocks, warps * 32, bytes(warps)},
          blocks == 1 ? 0 : NumberingPlan::kWords + std::int64_t{blocks} * params.num_experts};
}

void number_rows(Backend& executor, NumberRowsParams& params, const NumberingPlan& plan, std::int32_t* scratch,
                 StreamHandle stream) {
  if (plan.scratch_words != 0) {
    executor.fill(scratch, 0, NumberingPlan::kWords * sizeof(std::int32_t), stream);
    params.exchange = {scratch + NumberingPlan::kWords, reinterpret_cast<std::uint32_t*>(scratch) + 2,
                       reinterpret_cast<std::uint64_t*>(scratch)};
  }
  executor.kernels().number_selections(params, plan.shape, stream);
}

LaunchShape plan_spreading(SpreadRowsParams& params, const LaunchPolicy& policy) {
  return shape_for_pipelines(params.metadata.num_rows + params.num_experts, params.row_bytes, policy,
                             kernels::spread_rows::kMaxThreads, params.stages, params.stage_bytes);
}

void address_rows(Backend& executor, const AddressRowsParams& params, StreamHandle stream) {
  const auto ranks = static_cast<std::size_t>(params.num_ranks);
  executor.fill(params.num_tokens_per_rank, 0, ranks * sizeof(std::int32_t), stream);
  if (params.each_selection && params.num_sent != 0) {
    executor.fill(params.is_token_in_rank, 0, static_cast<std::size_t>(params.num_sent) * ranks, stream);
  }
  LaunchShape shape = shape_for_warps(params.metadata.num_rows, executor.policy(), kernels::address_rows::kMaxThreads);
  shape.shared_bytes = ranks * sizeof(std::int32_t);
  executor.kernels().address_rows(params, shape, stream);
}

void find_returned_rows(const Backend& executor, const SumRowsParams& params, StreamHandle stream) {
  if (params.returned.num_tokens == 0) return;
  executor.kernels().find_returned_rows(
      params, shape_for_warps((params.num_rows + 31) / 32, executor.policy(), kernels::find_returned_rows::kMaxThreads),
      stream);
}

void sum_rows(const Backend& executor, const SumRowsParams& params, StreamHandle stream) {
  const bool returned = params.returned.beside != nullptr;
  const std::int64_t sums = returned ? params.returned.num_tokens : params.metadata.num_rows;
  if (sums == 0) return;
  executor.kernels().sum_rows(
      params,
      shape_for_warps(pieces_of_sums(sums, params.row_bytes), executor.policy(), kernels::sum_rows::kMaxThreads),
      stream);
}

}  // namespace deep_ep
