// combine of the second interface: one kernel pushes and adds, for each token, the rows of its experts' ranks.
#include <algorithm>

#include "csrc/buffer/defaults.hpp"
#include "csrc/buffer/elastic/elastic.hpp"
#include "csrc/executor/kernel_table.hpp"
#include "csrc/support/format.hpp"
#include "kernels/elastic/params.hpp"

namespace deep_ep {
namespace {

void plan_window(ElasticCombineParams& params, int max_tokens, const Runtime& runtime) {
  TokenWindow& window = params.window;
  window.parts = params.each_selection ? params.num_topk : std::min(runtime.num_ranks(), params.num_topk);
  window.row_stride = static_cast<std::uint32_t>(align_to_line(params.row_bytes));
  window.words_beside = params.each_selection ? 1 : params.weighted ? static_cast<std::uint32_t>(params.num_topk) : 0;
  window.max_tokens = max_tokens;
  fit_window(window, runtime.layout().window_at(), runtime);
  window.tokens = std::min(window.tokens, static_cast<std::int32_t>(runtime.layout().control.max_window_tokens()));
  if (window.tokens == 0) {
    fail<OutOfMemory>("the window of {} does not hold {} rows of {} for a token: raise heap_bytes or window_bytes",
                      format_bytes(runtime.layout().window_bytes), window.parts, format_bytes(window.row_stride));
  }
}

constexpr int kAddingBlocks = 2;   ///< that only add, for each block that pushes, as far as there are multiprocessors
constexpr int kPieceBytes = 1024;  ///< of a row: what a warp adds at once

LaunchShape plan_launch(ElasticCombineParams& params, int num_sms, const Runtime& runtime) {
  const LaunchPolicy& policy = runtime.policy();
  const int blocks = runtime.sms(num_sms, defaults::kCombineSms);
  const int warps = runtime.warps(kernels::combine_elastic::kMaxThreads);
  // `sms` bounds what touches other devices. To add takes more: most of what is read lies in this device's memory.
  const int adding_blocks = std::min(policy.multiprocessors - blocks, kAddingBlocks * blocks);
  const int tokens = std::min(params.num_tokens, params.window.tokens);
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
  params.pushers = blocks * (warps - params.adding_warps);
  params.adders = adding_blocks * warps + blocks * params.adding_warps;
  const int adders = std::max(1, params.adders);
  const int pieces = (static_cast<int>(params.row_bytes) + kPieceBytes - 1) / kPieceBytes;
  // All adders have something to do. Many tokens are added whole, unless several rows of each lie on this rank: then
  // the first ones would take as long as all adders need to read theirs, and so would the last ones.
  const int of_many = params.expanded ? pieces : tokens >= 2 * adders ? 1 : 2;
  const int wanted = tokens >= adders ? of_many : std::max(2, adders / std::max(1, tokens));
  params.parts_per_token = std::clamp(wanted, 1, pieces);
  return {blocks + adding_blocks, warps * 32,
          ElasticCombineShared(Carver::without_memory(), runtime.num_ranks()).bytes};
}

}  // namespace

CombineResult Buffer::combine_elastic(const ElasticCombineArguments& arguments, const CallOptions& call) {
  const BufferCall in(runtime_, "combine_elastic");
  NormalMode& mode = in.normal();
  check_elastic_combine(arguments, *runtime_);
  in->faults().raise();
  if (mode.rails()) {
    CallScope scope(in->calls(), call);
    const ElasticReturn back = scope.inside([&] { return mode.send_back(arguments, scope); });
    CombineResult result = sum_returned(back, *runtime_, scope);
    result.event = scope.finish();
    return result;
  }
  ElasticCombineParams params{};
  params.common = mode.common_;
  params.num_topk = static_cast<int>(arguments.topk_idx.size(1));
  params.num_local_experts = arguments.num_experts / mode.common_.num_ranks;
  params.row_bytes = static_cast<std::uint32_t>(arguments.x.size(1) * 2);
  params.expanded = arguments.expanded;
  params.each_selection = arguments.each_selection;
  params.weighted = arguments.topk_weights.has_value();
  params.topk_idx = indices_of(arguments.topk_idx);
  params.rows_at_owners = arguments.rows_at_owners.as<std::int32_t>();
  params.num_tokens = static_cast<std::int32_t>(arguments.topk_idx.size(0));
  set_biases(params, arguments);
  params.x = arguments.x.as<std::byte>();
  params.num_rows = arguments.x.size(0);
  params.metadata = row_metadata(arguments.metadata, arguments.source_ends, in->device());
  params.source_ends = arguments.source_ends.as<std::int32_t>();
  params.weights = memory_of<float>(arguments.topk_weights);
  plan_window(params, arguments.max_tokens, *runtime_);
  const LaunchShape shape = plan_launch(params, arguments.num_sms, *runtime_);

  CallScope scope(in->calls(), call);
  CombineResult result = make_sums(arguments.x, params.num_tokens, params.weighted ? params.num_topk : 0, scope);
  params.combined_x = result.combined_x.as<std::byte>();
  params.combined_weights = memory_of<float>(result.combined_topk_weights);
  params.wait = in->faults().wait_context();
  // All ranks have equally many passes: these follow from arguments that are equal on all ranks.
  for (TokenWindow& window = params.window; window.first_token < window.max_tokens;
       window.first_token += window.tokens) {
    in->executor()->kernels().combine_elastic(params, shape, scope.stream());
  }
  result.event = scope.finish();
  return result;
}

}  // namespace deep_ep
