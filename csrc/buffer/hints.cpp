// How much memory a buffer wants.
#include <algorithm>

#include "csrc/buffer/buffer_plan.hpp"
#include "csrc/buffer/checks.hpp"
#include "csrc/buffer/options.hpp"
#include "csrc/memory/arena.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/buffer.hpp"
#include "kernels/low_latency/params.hpp"

namespace deep_ep {

static_assert(Buffer::kMaxTopk == kMaxTopk);

std::size_t Buffer::heap_bytes_hint(int num_ranks, std::int64_t tokens, std::int64_t row_bytes, int num_topk,
                                    std::int64_t scale_bytes) {
  check_range("num_ranks", num_ranks, 1, kMaxRanks);
  check_range("tokens", tokens, 0, INT32_MAX / num_ranks);
  check_range("row_bytes", row_bytes, 0, INT32_MAX);
  check_range("num_topk", num_topk, 0, kMaxTopk);
  check_range("scale_bytes", scale_bytes, INT32_MIN, INT32_MAX);
  if (scale_bytes < 0) scale_bytes = row_bytes / 32;
  // Worst case: every rank sends all its tokens to one. Each tensor's start is aligned. A row has indices and weights
  // of its selections, and its index at the source. The window, a quarter, has room for some rows of each rank.
  constexpr std::int64_t kLeastTokens = 32;
  const std::int64_t rows = std::max(tokens, kLeastTokens) * num_ranks;
  const std::int64_t bytes_of_row = row_bytes + scale_bytes + std::int64_t{num_topk} * (8 + 4) + 4;
  check_range("tokens", tokens, 0, static_cast<std::int64_t>(kMostOptionBytes / 2) / bytes_of_row / num_ranks);
  const auto tensors = static_cast<std::size_t>(rows * bytes_of_row) + 8 * Arena::kAlignment;
  constexpr std::size_t kLeast = std::size_t{16} << 20;
  return (tensors + kLeast) / 3 * 4;
}

std::size_t Buffer::low_latency_bytes_hint(int max_tokens, std::int64_t hidden, int num_ranks, int num_experts,
                                           LowLatencySums sums) {
  check_range("max_tokens", max_tokens, 1, kMostLowLatencyTokens);
  check_range("hidden", hidden, 1, std::int64_t{1} << 24);
  check_range("num_ranks", num_ranks, 1, kMaxRanks);
  check_range("num_experts", num_experts, 1, 1 << 20);
  // The largest rows: those of a dispatch in bfloat16, with as many selections as there may be.
  const std::size_t row_bytes = LowLatencyRow{static_cast<int>(hidden), kMaxTopk, LowLatencyFormat::bf16, true}.bytes();
  // Of a combine, sums. Calls with hooks keep the rows of all sources together, one for each selection: room for so
  // many.
  constexpr std::size_t kSelections = 8;
  const int rest_bits = rest_bits_of(sums_in_effect(sums));
  const CombineRowFormat format{static_cast<int>(hidden), rest_bits};
  const auto ranks = static_cast<std::size_t>(num_ranks), tokens = static_cast<std::size_t>(max_tokens);
  const std::size_t unreduced = align_to_line((kSelections * format.bytes(false) + ranks - 1) / ranks);
  const std::size_t combine_bytes = std::max<std::size_t>(format.bytes(true), unreduced);
  // The window is shared by the bytes of a channel: for each of them a source has so much in a call.
  using Window = LowLatencyWindow;
  const auto of_channel_byte = [&](std::size_t bytes, LowLatencyKind kind) {
    const std::size_t share = Window::channel_bytes(kind, rest_bits);
    return (bytes + share - 1) / share;
  };
  const std::size_t of_source = std::max(of_channel_byte(row_bytes, LowLatencyKind::dispatch),
                                         of_channel_byte(combine_bytes, LowLatencyKind::combine));
  const std::size_t of_token = ranks * std::max(Window::kBytesPerSlot, 2 * Window::shares(rest_bits) * of_source);
  constexpr std::size_t kMost = std::size_t{7} << 30;  // with signals a tenth of what a GPU has
  const std::size_t fits = kMost / of_token;
  if (tokens <= fits) return align_up(tokens * of_token, std::size_t{1} << 20);
  fail<InvalidArgument>(
      "max_tokens is {}, allowed: at most {} for {} ranks and hidden {}, as a rank has room for the rows of each of "
      "them: low_latency.bytes would be more than {}",
      max_tokens, fits, num_ranks, hidden, format_bytes(kMost));
}

}  // namespace deep_ep
