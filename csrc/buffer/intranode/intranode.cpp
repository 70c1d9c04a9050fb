#include "csrc/buffer/intranode/intranode.hpp"

#include <algorithm>

#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/defaults.hpp"
#include "csrc/buffer/row_launch.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "kernels/elastic/params.hpp"

namespace deep_ep {
namespace {

/// The roles of a block's warps. `fetches`: some take this rank's rows out of its local rings. Returns how many blocks
/// there are.
int plan_warps(DispatchParams& params, const Config& config, const Runtime& runtime, bool fetches) {
  TransferParams& transfer = params.transfer;
  const int wanted = config.warps_per_block != 0 ? config.warps_per_block : runtime.policy().warps_per_block;
  const int warps = std::max(wanted, fetches ? 2 : 1);
  const int sms = runtime.sms(config, defaults::kDispatchSms);
  transfer.local_warps = fetches ? std::max(1, warps / 4) : 0;
  transfer.first_warps = warps - transfer.local_warps;
  return fetches ? sms : std::min(sms, std::max(1, (params.num_tokens + warps - 1) / warps));
}

/// The window as a place for all rows at once, if it has room for them.
std::optional<RowTargets> whole_window(std::byte* window, std::int64_t rows, const RowShape& shape,
                                       const Runtime& runtime) {
  constexpr std::size_t kPadding = RowTargets::kParts * kLine;
  const auto count = static_cast<std::size_t>(rows);
  const std::size_t bytes = runtime.layout().window_bytes;
  if (bytes < kPadding || (bytes - kPadding) / shape.all_bytes() < count) return std::nullopt;
  return RowTargets::carve(Carver(window), shape, count);
}

// About 32 pushing warps in all saturate NVLink; more get in each other's way (results/measurements/). Few blocks have
// more of them each, but not so many that too few warps are left to add.
constexpr int kGpuWarps = kernels::combine::kMaxThreads / 32;
constexpr int kGpuPushingWarpsInAll = 32;
constexpr int kGpuFewestPushingWarps = 2;
constexpr int kGpuMostPushingWarps = 4;

/// In how many parts each of the tokens is added, by so many warps. A warp that adds a whole token looks its rows up
/// once, and keeps most pieces of them under way; where a warp gets few tokens, all warps end at the same time only if
/// tokens are cut.
int parts_per_token(int tokens, int warps) {
  constexpr int kTokensOfWarp = 20;
  if (tokens >= kTokensOfWarp * warps) return 1;
  return 2 * tokens >= kTokensOfWarp * warps ? 2 : 4;
}

/// The roles of the warps of each of `blocks` blocks. If this rank pushes, one raises the words of pushed rows, and
/// the others share adding and pushing.
void plan_warps(CombineParams& params, int blocks, const Config& config, const Runtime& runtime, bool pushes) {
  const bool gpu = runtime.on_gpu();
  const int raising = pushes ? 1 : 0;
  int pushing = 0;
  int adding = 0;
  if (config.warps_per_block == 0 && gpu) {
    const int share = (kGpuPushingWarpsInAll + blocks - 1) / blocks;
    pushing = pushes ? std::clamp(share, kGpuFewestPushingWarps, kGpuMostPushingWarps) : 0;
    adding = kGpuWarps - pushing - raising;
  } else {
    const int wanted = config.warps_per_block != 0 ? config.warps_per_block : runtime.policy().warps_per_block;
    const int rest = std::max(wanted - raising, pushes ? 2 : 1);
    pushing = pushes ? std::max(1, rest / 3) : 0;
    adding = rest - pushing;
  }
  TransferParams& transfer = params.transfer;
  transfer.first_warps = adding;
  transfer.local_warps = pushing + raising;
  // A row whose slot is used again is released by one warp, which has added all of it.
  const bool release = transfer.num_tokens > transfer.local.slots;
  params.parts_per_token = release ? 1 : parts_per_token(transfer.num_tokens, blocks * adding);
  params.pushing_blocks = gpu ? std::max(1, kGpuPushingWarpsInAll / std::max(1, pushing)) : INT32_MAX;
}

}  // namespace

Intranode::Intranode(Runtime& runtime) : NormalMode(runtime) {
  allocate();
  common_.heaps = runtime.heap()->device_peers();
  local_tickets_ =
      runtime.zeroed_memory<std::uint32_t>(static_cast<std::size_t>(runtime_.num_ranks()) * sizeof(std::uint32_t));
  common_.grid = {common_.rank, common_.num_ranks, common_.num_ranks};
  common_.local_tickets = local_tickets_.get();
}

EventHandle Intranode::barrier(const CallOptions& call) {
  runtime_.faults().raise();
  CallScope scope(runtime_.calls(), call);
  const int most = runtime_.policy().warps_per_block * 32;
  const int threads = std::min((runtime_.num_ranks() + 31) / 32 * 32, std::min(most, kernels::barrier::kMaxThreads));
  runtime_.executor()->kernels().barrier({common_, runtime_.faults().wait_context()}, {1, threads}, scope.stream());
  return scope.finish();
}

void Intranode::launch(DispatchParams& params, const Config& config, const DispatchHandle& handle,
                       const DispatchOutputs& outputs, const CallScope& scope) {
  params.transfer.local = local_rings(PackedRow::bytes(params.rows, runtime_.num_ranks()),
                                      common_.control.fetched_rows(), Wanted::dispatch_rows, Wanted::dispatch_credit);
  // Peers write rows into place in the heap. Elsewhere they are copied from the window, if it holds all, or pass
  // through local rings in it.
  const std::optional<RowTargets> landed =
      outputs.in_heap ? std::nullopt : whole_window(runtime_.window(), handle.num_recv_rows, params.rows, runtime_);
  if (landed) params.output = *landed;
  const bool fetches = !outputs.in_heap && !landed;
  if (fetches && params.transfer.local.slots == 0) {
    fail<OutOfMemory>(
        "a heap of {} cannot hold the {} rows of this dispatch, and its window of {} not one row of {} "
        "from each of the {} ranks: raise heap_bytes or window_bytes",
        format_bytes(runtime_.heap()->bytes()), params.output_rows, format_bytes(runtime_.layout().window_bytes),
        format_bytes(params.transfer.local.slot_bytes), runtime_.num_ranks());
  }
  enqueue(params, plan_warps(params, config, runtime_, fetches), scope);
  if (!landed) return;
  CopyReceivedParams copying{};
  copying.rows = params.rows;
  copying.from = *landed;
  copying.to = outputs.targets();
  copying.num_rows = handle.num_recv_rows;
  copying.num_valid = params.transfer.rank_prefix_matrix + (common_.num_ranks - 1) * common_.num_ranks + common_.rank;
  const LaunchShape all = shape_for_pipelines(copying.num_rows, copying.rows.row_bytes, runtime_.executor()->policy(),
                                              kernels::copy_received::kMaxThreads, copying.stages, copying.stage_bytes);
  runtime_.executor()->kernels().copy_received(copying, all, scope.stream());
}

void Intranode::launch(CombineParams& params, const CombineArguments& arguments, const CallScope& scope) {
  const ConstTensorView& x = arguments.x;
  const auto& weights = arguments.topk_weights;
  params.transfer.local = local_rings(params.row_bytes + static_cast<std::size_t>(params.num_topk) * sizeof(float),
                                      common_.control.pushed_rows(), Wanted::combine_rows, Wanted::combine_credit);
  if (params.transfer.local.slots == 0) {  // also where this rank does not push: its peers may
    fail<OutOfMemory>(
        "the window of {} does not hold a row of {} from each of the {} ranks: raise heap_bytes or window_bytes",
        format_bytes(runtime_.layout().window_bytes), format_bytes(params.transfer.local.slot_bytes),
        runtime_.num_ranks());
  }
  const bool pushes = x.size(0) != 0 && !(runtime_.in_heap(x) && (!weights || runtime_.in_heap(*weights)));
  const int blocks = runtime_.sms(arguments.config, defaults::kCombineSms);
  plan_warps(params, blocks, arguments.config, runtime_, pushes);
  enqueue(params, blocks, scope);
}

}  // namespace deep_ep
