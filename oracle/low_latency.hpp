// The right results of low-latency dispatch and combine, for all ranks at once, in plain code.
//
// Symbols: R ranks, E experts, L = E / R local experts, M max_tokens, H hidden, K top-k, P = R * M. Dispatch gives the
// routes alone: counts, ranges, and which token each row is. `difference` compares the rows, one after the other, as a
// host cannot hold the data of all ranks at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "oracle/normal.hpp"

namespace deep_ep::oracle {

struct LowLatencyShape {
  int ranks = 0;
  int experts = 0;
  std::int64_t max_tokens = 0;

  int local_experts() const { return experts / ranks; }
  /// Rows of one expert's part of the output.
  std::int64_t expert_rows() const { return ranks * max_tokens; }
};

/// How dispatched rows travel and arrive.
enum class RowFormat : std::uint8_t {
  bf16,
  fp8,          ///< float scales
  fp8_rounded,  ///< float scales that are powers of two
  fp8_ue8m0,    ///< the same, as packed exponents
  nvfp4,        ///< with kGlobalScale
  fp8_aligned,  ///< float scales, by true divisions
};
inline constexpr RowFormat kRowFormats[] = {RowFormat::bf16,      RowFormat::fp8,   RowFormat::fp8_rounded,
                                            RowFormat::fp8_ue8m0, RowFormat::nvfp4, RowFormat::fp8_aligned};
const char* name_of(RowFormat format);
/// One that is no power of two.
inline constexpr float kGlobalScale = 40.5f;

/// Bytes of a row's channels.
constexpr std::int64_t row_bytes(RowFormat format, std::int64_t hidden) {
  return format == RowFormat::bf16 ? 2 * hidden : format == RowFormat::nvfp4 ? hidden / 2 : hidden;
}
/// Words of scales of a row.
constexpr std::int64_t scale_words(RowFormat format, std::int64_t hidden) {
  if (format == RowFormat::bf16) return 0;
  return hidden / (format == RowFormat::nvfp4 ? 64 : format == RowFormat::fp8_ue8m0 ? 512 : 128);
}

/// For each rank its opinion of the others, [R, R]: masks[r * R + p] != 0: r neither sends to p nor waits for it.
/// Empty: no rank is masked.
using Masks = std::vector<std::uint8_t>;

/// One row in the form in which it arrives.
struct FormattedRow {
  std::vector<std::byte> x;           ///< row_bytes
  std::vector<std::uint32_t> scales;  ///< scale_words: the bits of a float, or four scales of a byte each
};
FormattedRow format_row(Row row, RowFormat format);

/// The origins of the rows of one rank.
struct LowLatencyReceived {
  std::vector<std::int32_t> count;         ///< [L]: valid rows
  std::vector<std::int64_t> layout_range;  ///< [L, R]: (first row << 32) | rows
  std::vector<std::int32_t> src_info;      ///< [L, P]: token at the source, -1 where no row is
};

/// One rank's results of dispatch as the library leaves them in memory. Rows that no token fills may hold anything.
struct LowLatencyOutput {
  LowLatencyReceived routes;
  std::vector<std::byte> x;  ///< [L, P, row_bytes]
  /// [L, scale_words, P]; of NVFP4 [L, tiles of 128 rows, scale_words, 128], where row r of a tile is at r % 32 * 4 + r
  /// / 32.
  std::vector<std::uint32_t> scales;
};

struct LowLatencyDispatched {
  LowLatencyShape shape;
  std::vector<LowLatencyReceived> received;  ///< one per rank
  /// For each source [tokens, K]: row in the owner's [L * P], -1 where there is none.
  std::vector<std::vector<std::int64_t>> selection_row;
  std::vector<std::vector<std::int64_t>> selection;  ///< for each source [tokens, K]: the experts as dispatched
};

/// Rows of an expert: by source rank, then by token, then by position among the token's selections (an expert that a
/// token names twice gets it twice).
LowLatencyDispatched low_latency_dispatch(const LowLatencyShape& shape, std::span<const Selection> selections,
                                          const Masks& masks = {});

/// The first thing in which a rank's results are not what they must be, bit for bit; empty if all are right. `sent`: a
/// row before the call.
std::string difference(const LowLatencyShape& shape, RowFormat format, const LowLatencyReceived& expected,
                       const LowLatencyOutput& seen, const std::function<Row(int source, std::int64_t token)>& sent);

/// One rank's arguments of combine.
struct LowLatencyCombineInput {
  std::vector<std::uint16_t> x;  ///< [L, P, H] bfloat16 bits
  Selection selection;           ///< of the rank's own tokens, now: entries that have become negative are left out
};

struct LowLatencyCombineOptions {
  Masks masks{};
  int ranks_per_node = 0;  ///< so many consecutive ranks make a node; 0: all do
  int sum_bits = 32;       ///< the upper bits of a float that a sum of several rows keeps: 16, 24 or 32
};

/// A token's sum, whatever way its rows take. rows_of_ranks[r]: what the token has of rank r, selections ascending. The
/// rows of a rank are added from zero on, by fused multiply-adds, in the order of selections; the ranks' sums of a node
/// from zero on, ranks ascending; the nodes' sums, ascending; and the last sum is rounded to bfloat16. A sum of several
/// rows of a rank, or, where there are several nodes, of a node, is rounded to sum_bits, to nearest, ties away from
/// zero.
Combined low_latency_sum(std::span<const std::vector<WeightedRow>> rows_of_ranks, std::int64_t hidden,
                         const LowLatencyCombineOptions& options = {});
/// Of all tokens.
std::vector<Combined> low_latency_combine(const LowLatencyDispatched& dispatched,
                                          std::span<const LowLatencyCombineInput> inputs, std::int64_t hidden,
                                          const LowLatencyCombineOptions& options = {});

}  // namespace deep_ep::oracle
