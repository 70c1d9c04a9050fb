// The right results of low-latency dispatch and combine, for all ranks at once, in plain code.
//
// Symbols: R ranks, E experts, L = E / R local experts, M max_tokens, H hidden, K top-k. Rows that no token fills are
// zero here and undefined in the library: compare only rows below `count`.
//
// With a hidden size of 0 dispatch gives the routes alone: counts, ranges, and which token each row is. Who cannot hold
// the data of all ranks at once makes rows with `format_row` and sums with `combine_row`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "oracle/normal.hpp"

namespace deep_ep::oracle {

struct LowLatencyShape {
  int ranks = 0;
  int experts = 0;
  std::int64_t hidden = 0;
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
/// Float scales of a row.
constexpr std::int64_t float_scales(RowFormat format, std::int64_t hidden) {
  const bool each_block =
      format == RowFormat::fp8 || format == RowFormat::fp8_rounded || format == RowFormat::fp8_aligned;
  return each_block ? hidden / 128 : 0;
}
/// Words of four scales.
constexpr std::int64_t packed_scales(RowFormat format, std::int64_t hidden) {
  return format == RowFormat::fp8_ue8m0 ? hidden / 512 : format == RowFormat::nvfp4 ? hidden / 64 : 0;
}

/// One rank's arguments of dispatch.
struct LowLatencyInput {
  Selection selection;           ///< at most max_tokens tokens
  std::vector<std::uint16_t> x;  ///< [tokens, H] bfloat16 bits
};

/// For each rank its opinion of the others, [R, R]: masks[r * R + p] != 0: r neither sends to p nor waits for it.
/// Empty: no rank is masked.
using Masks = std::vector<std::uint8_t>;

/// One row in the form in which it arrives.
struct FormattedRow {
  std::vector<std::byte> x;                 ///< row_bytes
  std::vector<float> scales;                ///< float_scales
  std::vector<std::int32_t> packed_scales;  ///< packed_scales
};
FormattedRow format_row(std::span<const std::uint16_t> row, RowFormat format);

/// One rank's results of dispatch; P = R * M.
struct LowLatencyReceived {
  std::vector<std::int32_t> count;          ///< [L]: valid rows
  std::vector<std::int64_t> layout_range;   ///< [L, R]: (first row << 32) | rows
  std::vector<std::int32_t> src_info;       ///< [L, P]: token at the source, -1 where no row is
  std::vector<std::byte> x;                 ///< [L, P, bytes of a row]
  std::vector<float> scales;                ///< [L, P, scales of a row], logical order (the library's is another)
  std::vector<std::int32_t> packed_scales;  ///< the same
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
LowLatencyDispatched low_latency_dispatch(const LowLatencyShape& shape, std::span<const LowLatencyInput> inputs,
                                          RowFormat format, const Masks& masks = {});

/// One rank's arguments of combine.
struct LowLatencyCombineInput {
  std::vector<std::uint16_t> x;  ///< [L, P, H] bfloat16 bits
  Selection selection;           ///< of the rank's own tokens, now: entries that have become negative are left out
};

struct LowLatencyCombineOptions {
  bool fused = false;  ///< see combine_row
  /// The owner adds all rows itself, in fp32, selections ascending, and rounds once.
  bool unreduced = false;
  Masks masks{};
  /// By rails: a node that is not the owner's sends one part. 0: every rank sends its own.
  int ranks_per_node = 0;
};

/// Each rank adds its experts' weighted rows, selections ascending, and the owner their parts, as combine_row says (but
/// see `unreduced`).
std::vector<Combined> low_latency_combine(const LowLatencyDispatched& dispatched,
                                          std::span<const LowLatencyCombineInput> inputs,
                                          const LowLatencyCombineOptions& options = {});

/// [outer, rows, columns] in logical order to memory order [outer, columns, rows].
template <class T>
std::vector<T> column_major(std::span<const T> values, std::int64_t outer, std::int64_t rows, std::int64_t columns) {
  std::vector<T> result(values.size());
  for (std::int64_t o = 0; o < outer; ++o) {
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t c = 0; c < columns; ++c) {
        result[static_cast<std::size_t>((o * columns + c) * rows + r)] =
            values[static_cast<std::size_t>((o * rows + r) * columns + c)];
      }
    }
  }
  return result;
}

}  // namespace deep_ep::oracle
