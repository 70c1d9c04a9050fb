// Rows that need no flag behind them: they travel in lines of 128 bytes, 120 of payload and a tag of 8, which eight
// neighbouring lanes store at once. A line arrives whole, so whoever sees the tag of this call has the payload, one
// trip over the wire after it was stored. Neither side waits for completions or fences.
//
// That a line which one instruction stores arrives whole is a property of the memory system of NVIDIA GPUs and NVLink
// (Volta and later; NCCL's protocol LL128 is built on it), not of the PTX memory model, which promises it for 16 bytes.
// Primitives.TaggedLines (tests/kernels) tests it within one GPU, the low-latency tests between GPUs; over a fabric
// between hosts each buffer tries it when it is made.
//
// A line has one writer, and lies at the same place for every call that uses the memory, so that nothing but tags is
// ever written where tags are. It may be written again only when the reader is known to be done with it.
#pragma once

#include "kernels/primitives/cell.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep {

constexpr std::uint32_t kTaggedLine = 128;
constexpr std::uint32_t kTaggedPayload = 120;

DEEP_EP_HOST_DEVICE constexpr std::uint32_t tagged_lines(std::uint32_t bytes) {
  return (bytes + kTaggedPayload - 1) / kTaggedPayload;
}

namespace device {

constexpr int kLineLanes = 8;                       ///< that share a line
constexpr int kWarpLines = kWarpSize / kLineLanes;  ///< that a warp stores or loads at once

/// The lane's place in a warp's lines. Its 16 bytes of a line are a Cell: the tag is the epoch of the last lane's, and
/// the other lanes have payload there, too.
struct LineLane {
  int line = lane_index() / kLineLanes;  ///< 0 to kWarpLines - 1
  int part = lane_index() % kLineLanes;  ///< 0 to kLineLanes - 1

  DEEP_EP_DEVICE bool has_tag() const { return part == kLineLanes - 1; }
  /// Where its payload lies in the row, in bytes: a multiple of 8. `index` counts the row's lines.
  DEEP_EP_DEVICE std::uint32_t payload_at(std::uint32_t index) const {
    return index * kTaggedPayload + static_cast<std::uint32_t>(part) * 16;
  }
  /// Where lines carry vectors of 16 bytes: which one this lane has in line `index`. The last lane has half of one: two
  /// neighbouring lines share it.
  DEEP_EP_DEVICE int vector(std::uint32_t index) const {
    constexpr int kWhole = kLineLanes - 1;
    return vectors(index) + (has_tag() ? 2 * kWhole : static_cast<int>(index % 2) * kWhole + part);
  }
  /// How many so many lines have, an even number.
  DEEP_EP_DEVICE static int vectors(std::uint32_t lines) { return static_cast<int>(lines / 2) * (2 * kLineLanes - 1); }
  DEEP_EP_DEVICE std::uint32_t byte_at(std::uint32_t index) const {
    return index * kTaggedLine + static_cast<std::uint32_t>(part) * 16;
  }
};

/// This lane's part of line `index` of those whose payload lies at `stage`, without tags.
DEEP_EP_DEVICE Cell tagged_part(const std::byte* stage, std::uint32_t index, std::uint64_t tag) {
  const LineLane lane;
  const auto* words = reinterpret_cast<const std::uint64_t*>(stage + lane.payload_at(index));
  return {words[0], lane.has_tag() ? tag : words[1]};
}

/// The same where lines carry vectors: the lane has this one.
DEEP_EP_DEVICE Cell tagged_part(const Vec16& vector, std::uint32_t index, std::uint64_t tag) {
  const auto whole = __builtin_bit_cast(Cell, vector);
  if (!LineLane().has_tag()) return whole;
  return {index % 2 == 0 ? whole.payload : whole.epoch, tag};
}

/// Stores what this lane has of line `index`, which carries vectors, at its vector `to` of a row.
DEEP_EP_DEVICE void store_vector(Vec16* to, std::uint32_t index, const Cell& part) {
  if (LineLane().has_tag()) {
    store_stream(reinterpret_cast<std::uint64_t*>(to) + index % 2, part.payload);
  } else {
    store_stream(to, __builtin_bit_cast(Vec16, part));
  }
}

/// Stores this lane's part to `to`, in memory of any GPU. By whole warps; `wanted` is the same for the lanes of a line.
DEEP_EP_DEVICE void store_line(std::byte* to, const Cell& part, bool wanted) {
  warp::sync();  // one instruction for all lanes; and what their parts are made of has been read
  auto* cell = reinterpret_cast<Cell*>(to);
  const bool tag = !DEEP_EP_TARGET_CUDA && LineLane().has_tag();  // which the CPU stores behind the rest
  if (wanted && !tag) store_cell(cell, part.payload, part.epoch);
#if !DEEP_EP_TARGET_CUDA
  warp::sync();
  if (wanted && tag) store_cell(cell, part.payload, part.epoch);
#endif
}

/// Loads this lane's part of a line that may be there or not: see all_tagged(). By whole warps; `wanted` is the same
/// for the lanes of a line.
DEEP_EP_DEVICE Cell load_line(const std::byte* from, bool wanted) {
  Cell loaded{};
  const auto* cell = reinterpret_cast<const Cell*>(from);
  const bool tag = !DEEP_EP_TARGET_CUDA && LineLane().has_tag();
#if !DEEP_EP_TARGET_CUDA
  if (wanted && tag) loaded = load_cell(cell);
  warp::sync();  // what the last lane acquired, the others may read
#endif
  if (wanted && !tag) loaded = load_cell(cell);
  return {loaded.payload, loaded.epoch};  // a copy takes the GPU more instructions
}

/// Do all the warp's lines that are wanted carry the tag? By whole warps.
DEEP_EP_DEVICE bool all_tagged(const Cell& part, std::uint64_t tag, bool wanted) {
  return warp::all(!wanted || !LineLane().has_tag() || part.epoch == tag);
}

/// Pieces of rows that a warp polls into its registers. A piece is up to kWarpLines lines, of which each lane has its
/// part; pieces may belong to one row or to several.
template <int kPieces>
struct LinePoller {
  Cell part[kPieces];
  std::uint32_t missing = (1u << kPieces) - 1;  ///< bit i: piece i is not there

  /// By a whole warp: loads what is missing. `tag(i)` is the tag of piece i, `from(i)` where the lane's part of it
  /// lies, `is_line(i)` whether there is such a line. If not `thorough`, looks at the first of them only, and at the
  /// others when that has come: polls of all warps together would slow down what they wait for. True when none is
  /// missing.
  template <class Tag, class From, class IsLine>
  DEEP_EP_DEVICE bool poll(bool thorough, Tag tag, From from, IsLine is_line) {
    std::uint32_t polled = thorough ? missing : missing & (~missing + 1);
#pragma unroll 1
    for (;;) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if ((polled >> i & 1u) != 0) part[i] = load_line(from(i), is_line(i));
      }
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if ((polled >> i & 1u) != 0 && all_tagged(part[i], tag(i), is_line(i))) missing &= ~(1u << i);
      }
      if (missing == 0) return true;
      if ((polled & missing) != 0) return false;
      polled = missing;
    }
  }
};

}  // namespace device
}  // namespace deep_ep
