// Arguments of the low-latency kernels. Plain data: host code fills it, kernels read it.
#pragma once

#include <cstdint>

#include "deep_ep/low_latency_format.hpp"
#include "kernels/common/call.hpp"
#include "kernels/common/topk.hpp"
#include "kernels/low_latency/window.hpp"
#include "kernels/primitives/divisor.hpp"
#include "kernels/primitives/line.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep {

constexpr int kMostLowLatencyTokens = 65535;   ///< what a selection's place can count
constexpr int kMostLowLatencyExperts = 65535;  ///< what a selection can name; 0xffff is none

/// The parts of a call: one kernel does both, or a kernel each.
struct LowLatencyPhase {
  bool sends = true, receives = true;
};

/// How one kind of call is counted, in this rank's device memory. Zero when the buffer is made, as after each call is
/// what its last block resets.
struct LowLatencyCounters {
  /// Calls whose part has run, as Progress: of each call every block adds its part. So no block waits for the others,
  /// and none that has not added its part sees the next call.
  std::uint64_t sent, received;
  std::uint32_t arrived;   ///< blocks that are done, if the last one tells the peers so; reset
  std::uint64_t finished;  ///< with masking: sum of what blocks that have received say; see receive_with_masks(); reset

  /// By one thread of every block, once the block knows the epoch.
  DEEP_EP_DEVICE void add_part(LowLatencyPhase phase) {
    const std::uint64_t part = Progress::part_of_call(device::grid_blocks(), device::block_index() == 0);
    if (phase.sends) device::add_relaxed<device::Scope::gpu>(&sent, part);
    if (phase.receives) device::add_relaxed<device::Scope::gpu>(&received, part);
  }
};

struct LowLatencyState {
  LowLatencyCounters counters[kLowLatencyKinds];
  CallCounter barriers;
};

/// A rank's queue pairs to a peer, so that no two kernels that may run at once share one: for each lane one of each
/// kind of calls. Barriers, which come when no call is under way, take all of them.
DEEP_EP_HOST_DEVICE constexpr int channel_of(LowLatencyKind kind, int lane) {
  return lane * static_cast<int>(kLowLatencyKinds) + static_cast<int>(kind);
}
DEEP_EP_HOST_DEVICE constexpr int low_latency_channels(int lanes) {
  return channel_of(LowLatencyKind::dispatch, lanes);
}

/// With masking, a wait that lasts for so many time-outs ends the call: ranks have mixed up their calls.
constexpr int kMostTimeouts = 8;

struct LowLatencyParams {
  int rank = 0;
  Divisor num_ranks;
  std::byte* local = nullptr;  ///< this rank's heap
  /// Heap of every rank as this rank maps it, of use for one that is not far; readable by kernels.
  std::byte* const* heaps = nullptr;
  const RdmaQueuePair* peers = nullptr;                 ///< [channel][num_ranks]; nullptr: no rank is far
  std::uint32_t far_ranks[(kMaxRanks + 31) / 32] = {};  ///< a bit for each
  int num_far = 0;
  int lanes = 1;           ///< to each far rank: queue pairs that rows take in turn, a power of two
  Divisor rail_width = 0;  ///< ranks of a node, where rows of this call go by rails; else 0
  /// Ranks of a node, by which combine adds, if there are several nodes of equally many consecutive ranks; else 0.
  Divisor node_width = 0;
  /// Blocks of the grid that move rows. Those behind them post to far ranks, over one lane in each warp; where nobody
  /// is far, there is at most one, and it tells the peers what concerns all of them.
  int working_blocks = 0;
  LowLatencyWindow window;
  LowLatencyState* state = nullptr;
  WaitContext wait;
  WaitContext posts;              ///< of waits for queue pairs: with masking a failed one does not end the call
  std::uint64_t* mask = nullptr;  ///< ControlState::mask. nullptr: ranks are never masked
  /// The stream's next kernel may start before the results are stored: see DEEP_EP_PROGRAMMATIC_LAUNCH.
  bool lets_next_start = false;

  void set_far(int far_rank) {
    far_ranks[far_rank / 32] |= 1u << far_rank % 32;
    ++num_far;
  }
  /// A far rank is not mapped here, and does not map this one.
  DEEP_EP_DEVICE bool is_far(int rank) const {
    return (far_ranks[static_cast<unsigned>(rank) / 32] >> static_cast<unsigned>(rank) % 32 & 1) != 0;
  }
  DEEP_EP_DEVICE const RdmaQueuePair& queue_pair(int channel, int peer) const {
    return peers[channel * num_ranks + peer];
  }
  DEEP_EP_DEVICE LowLatencyCounters& counters(LowLatencyKind kind) const {
    return state->counters[static_cast<int>(kind)];
  }
};

/// A handle's table of a dispatch and the rows that it received, in rows of R int32: the number of rows of each source,
/// M tokens, M * K positions, the dispatch's number, and with weights M * K of these. An int counts the words: M * K is
/// at most kMostLowLatencyTokens.
struct LowLatencyRowTable {
  std::int32_t* base;
  int num_ranks, max_tokens, num_topk;

  DEEP_EP_HOST_DEVICE std::int64_t height(bool weighted) const {
    return 2 + std::int64_t{max_tokens} * (1 + num_topk * (weighted ? 2 : 1));
  }
  DEEP_EP_HOST_DEVICE std::int32_t* rows(int source) const { return base + source; }
  DEEP_EP_HOST_DEVICE std::int32_t* token(int source, int row) const {
    return base + (num_ranks + source * max_tokens + row);
  }
  /// Which row of recv_x selection `k` of the row is; -1: on another rank.
  /// It is in block position / (R * M), which is the local expert.
  DEEP_EP_HOST_DEVICE std::int32_t* position(int source, int row, int k) const {
    return base + (num_ranks * (1 + max_tokens) + (source * max_tokens + row) * num_topk + k);
  }
  /// The low half of the dispatch's number, which is the same on all ranks.
  DEEP_EP_HOST_DEVICE std::int32_t* epoch() const { return position(0, num_ranks * max_tokens, 0); }
  DEEP_EP_HOST_DEVICE float* weight(int source, int row, int k) const {
    return reinterpret_cast<float*>(position(source, num_ranks * max_tokens + row, k) + num_ranks);
  }
};

/// Channels that share a scale.
constexpr int kScaleChannels = 128;
constexpr int kNvfp4ScaleChannels = 16;  ///< a scale is a byte: four of them in a word

/// A row of dispatch as it travels, in tagged lines. The first ones carry a header of words (the token's index at its
/// source, for each selection the expert and its place among the source's entries that name this expert, and by rails
/// the row's slot on the expert's rank, or, never by rails, its weight in combine), words of scales (float32, also for
/// UE8M0; NVFP4: four E4M3); the others carry the payload, in vectors of 16 bytes.
struct LowLatencyRow {
  int hidden, num_topk;
  LowLatencyFormat format;
  bool by_rails = false, weighted = false;

  DEEP_EP_HOST_DEVICE bool scaled() const { return format != LowLatencyFormat::bf16; }
  DEEP_EP_HOST_DEVICE bool nvfp4() const { return format == LowLatencyFormat::nvfp4; }

  // Words of the header.
  static constexpr int kToken = 0;
  DEEP_EP_HOST_DEVICE int selection_word(int k) const { return 1 + k; }
  DEEP_EP_HOST_DEVICE int second_word(int k) const { return 1 + num_topk + k; }  ///< slot or weight
  DEEP_EP_HOST_DEVICE int header_words() const { return 1 + num_topk * (by_rails || weighted ? 2 : 1); }

  // Offsets in the row, without tags.
  DEEP_EP_HOST_DEVICE std::uint32_t scales_at() const { return 4 * static_cast<std::uint32_t>(header_words()); }
  DEEP_EP_HOST_DEVICE std::uint32_t scale_words() const {
    if (nvfp4()) return static_cast<std::uint32_t>(hidden) / (4 * kNvfp4ScaleChannels);
    return scaled() ? static_cast<std::uint32_t>(hidden) / kScaleChannels : 0;
  }
  DEEP_EP_HOST_DEVICE std::uint32_t head_lines() const { return tagged_lines(scales_at() + scale_words() * 4); }
  DEEP_EP_HOST_DEVICE std::uint32_t payload_bytes() const {
    if (nvfp4()) return static_cast<std::uint32_t>(hidden) / 2;
    return static_cast<std::uint32_t>(hidden) * (scaled() ? 1 : 2);
  }
  DEEP_EP_HOST_DEVICE int vectors() const { return static_cast<int>(payload_bytes() / 16); }

  DEEP_EP_HOST_DEVICE std::uint32_t lines() const { return head_lines() + tagged_lines(payload_bytes()); }
  /// In the window, with tags.
  DEEP_EP_HOST_DEVICE std::uint32_t bytes() const { return lines() * kTaggedLine; }
  // In shared memory, without tags: the first lines, then the payload.
  DEEP_EP_HOST_DEVICE std::uint32_t payload_at() const { return (head_lines() * kTaggedPayload + 15) / 16 * 16; }
  DEEP_EP_HOST_DEVICE std::uint32_t stage_bytes() const { return payload_at() + payload_bytes(); }

  static constexpr std::uint32_t kNoExpert = 0xffff;  ///< no rank's; in a selection's lower half, its place is above
};

/// Scales of received rows, as grouped GEMMs load them, in words: float, or with UE8M0 the exponents of four
/// neighbouring scales, or of NVFP4 four scales of 64 channels. FP8: [blocks][columns][rows], with blocks and rows as
/// in recv_x. NVFP4, as tensor cores of sm_100 load them: [blocks][tiles of 128 rows][columns] tiles of 512 bytes, in
/// which the word of row r lies at 16 * (r % 32) + 4 * (r / 32).
struct LowLatencyScales {
  static constexpr int kTileRows = 128;
  LowLatencyFormat format;
  int hidden;
  int rows;  ///< of a block

  DEEP_EP_HOST_DEVICE bool tiled() const { return format == LowLatencyFormat::nvfp4; }
  DEEP_EP_HOST_DEVICE bool packed() const { return format == LowLatencyFormat::fp8_ue8m0; }
  DEEP_EP_HOST_DEVICE int columns() const {
    return static_cast<int>(LowLatencyRow{hidden, 0, format}.scale_words()) / (packed() ? 4 : 1);
  }
  DEEP_EP_HOST_DEVICE int tiles() const { return (rows + kTileRows - 1) / kTileRows; }
  /// The first word of a row.
  DEEP_EP_HOST_DEVICE std::int64_t first(int block, int row) const {
    if (!tiled()) return std::int64_t{block} * columns() * rows + row;
    const std::int64_t tile = std::int64_t{block} * tiles() + row / kTileRows;
    return tile * columns() * kTileRows + row % 32 * 4 + row % kTileRows / 32;
  }
  DEEP_EP_HOST_DEVICE int stride() const { return tiled() ? kTileRows : rows; }
};

struct LowLatencyCallParams {
  LowLatencyParams common;
  LowLatencyPhase phase;

  // Equal on all ranks.
  int max_tokens;
  Divisor num_topk;
  int hidden;
  Divisor num_local_experts;
  Divisor expert_rows;       ///< num_ranks * max_tokens: each local expert has room for so many
  std::uint32_t call_shape;  ///< a hash of these and of what the kind of call adds: ranks that disagree find out

  Divisor warps_per_row;  ///< that share a row: receiving it (dispatch, divides the warps of a block), or pushing it

  // As owner of tokens.
  int num_tokens;
  TopkIndices topk_idx;  ///< [num_tokens, num_topk]

  std::int32_t* row_table;  ///< see LowLatencyRowTable: dispatch writes it, combine reads it
  std::int64_t* wait_cost;  ///< [R], added to; nullptr: none

  DEEP_EP_HOST_DEVICE int num_experts() const { return num_local_experts * common.num_ranks; }
  /// The rank of an expert, negative for none.
  DEEP_EP_HOST_DEVICE int rank_of(int expert) const { return expert < 0 ? -1 : expert / num_local_experts; }
  DEEP_EP_HOST_DEVICE LowLatencyRowTable table() const { return {row_table, common.num_ranks, max_tokens, num_topk}; }
};

struct LowLatencyDispatchParams : LowLatencyCallParams {
  // Equal on all ranks.
  Divisor count_cells;  ///< that tell one rank how many rows it gets: one, and one for each two of its experts
  LowLatencyFormat format;
  bool weighted;  ///< rows carry the weights of combine

  // What is sent.
  const std::byte* x;            ///< [num_tokens, hidden] bfloat16
  const float* combine_weights;  ///< [num_tokens, num_topk], if rows carry weights
  const float* global_scale;     ///< [1], of nvfp4; nullptr: 1

  /// A row as it travels, directly or by rails. Kernels know by their kind whether it has weights, which `weighted`
  /// says.
  DEEP_EP_HOST_DEVICE LowLatencyRow row(bool by_rails, bool with_weights) const {
    return {hidden, num_topk, format, by_rails, with_weights};
  }

  // What is received: R = num_ranks, M = max_tokens, L = num_local_experts.
  DEEP_EP_HOST_DEVICE LowLatencyScales scale_layout() const { return {format, hidden, expert_rows}; }
  std::byte* recv_x;           ///< [L, R * M] rows
  std::byte* recv_scales;      ///< as scale_layout() places them; nullptr: bf16
  std::int32_t* recv_count;    ///< [L]
  std::int32_t* src_info;      ///< [L, R * M]
  std::int64_t* layout_range;  ///< [L, R]
  std::int32_t* recv_stats;    ///< [L], added to; nullptr: none

  std::int64_t* arrivals;  ///< [L, arrival_words], added to: see deep_ep/arrivals.hpp; nullptr: none
  int arrival_words;
  int arrival_shift;  ///< a word stands for 1 << arrival_shift rows
};

/// By which the program tells the send part of a combine which rows of x are there: see LowLatencyOverlap.
struct LowLatencySignals {
  const std::uint32_t* words = nullptr;  ///< [local experts, words_of_expert]; nullptr: all rows are there
  int words_of_expert = 1;
  Divisor rows_of_word;
  std::uint32_t expected = 0;  ///< a word says so once it is at least this
};

/// A row of combine as it travels from an expert's rank to the token's owner: LL128 lines with vectors of bfloat16, the
/// upper halves of the channels. Behind them a sum of several rows has lines with the rest of each channel, the next 8
/// or 16 bits.
struct CombineRowFormat {
  int hidden = 0;
  int rest_bits = 0;  ///< of a channel of a sum: 0, 8 or 16
  // Kernels find the numbers that follow among their parameters: registers are scarce.
  int vectors = hidden / 8;
  std::uint32_t lines = tagged_lines(2 * static_cast<std::uint32_t>(hidden));  ///< without the rest
  int line_groups = (static_cast<int>(lines) + device::kWarpLines - 1) /
                    device::kWarpLines;  ///< of four lines: a warp's work at once

  /// In the window, with the rest or without it.
  DEEP_EP_HOST_DEVICE std::uint32_t bytes(bool rest) const {
    const std::uint32_t of_8_bits = lines / 8 * 4 + (lines % 8 < 4 ? lines % 8 : 4);
    const std::uint32_t rest_lines = rest_bits == 0 ? 0 : rest_bits == 8 ? of_8_bits : lines;
    return (lines + (rest ? rest_lines : 0)) * kTaggedLine;
  }
  /// The line with the rest of what `line` has: of 16 bits one for each line, of 8 bits one for two lines that are four
  /// apart, which the same lane of a warp has.
  DEEP_EP_DEVICE std::uint32_t rest_line(std::uint32_t line) const {
    return lines + (rest_bits == 16 ? line : line / 8 * 4 + line % 4);
  }
  /// Of 8 bits: which of the two lines, 0 or 1.
  DEEP_EP_DEVICE static int rest_half(std::uint32_t line) { return static_cast<int>(line / 4 % 2); }
  /// The vector of the row that the lane has in a line; -1: none.
  DEEP_EP_DEVICE int vector(std::uint32_t line) const {
    const int vector = device::LineLane().vector(line);
    return vector < vectors ? vector : -1;
  }
  /// By a whole warp: stores the lane's part of a line into the row at `to`.
  DEEP_EP_DEVICE void store(std::byte* to, std::uint32_t line, const device::Vec16& vector, std::uint64_t tag) const {
    device::store_line(to + device::LineLane().byte_at(line), device::tagged_part(vector, line, tag), line < lines);
  }
  /// The same of the line with its rest, of which the lane has the part that it has of the line.
  DEEP_EP_DEVICE void store_rest(std::byte* to, std::uint32_t line, const device::Vec16& vector,
                                 std::uint64_t tag) const {
    device::store_line(to + device::LineLane().byte_at(rest_line(line)), device::tagged_part(vector, line, tag),
                       line < lines);
  }
};

struct LowLatencyCombineParams : LowLatencyCallParams {
  std::uint32_t row_bytes;  ///< room for a row as it travels
  std::uint32_t row_lines;  ///< the same
  CombineRowFormat format;

  // As expert side: what is sent.
  const std::byte* x;  ///< rows as dispatch laid them out, bfloat16

  // As owner: what is added up.
  const float* topk_weights;  ///< [num_tokens, num_topk]
  std::byte* combined_x;      ///< [num_tokens, hidden] bfloat16

  LowLatencySignals signals;  ///< of calls that go unreduced, and only their send part

  /// Rows that each of so many groups of warps pushes, at most, and that signals may hold up.
  DEEP_EP_HOST_DEVICE int held_up(int groups) const {
    return signals.words == nullptr || groups == 0 ? 0 : (expert_rows + groups - 1) / groups;
  }
};

/// A program reads or changes its masks, in the order of calls.
enum class LowLatencyMasksStep : int { query, mask, unmask };
struct LowLatencyMasksParams {
  WaitContext wait;
  LowLatencyMasksStep step;
  int rank = -1;                   ///< that is masked, or unmasked; -1: all
  std::int32_t* status = nullptr;  ///< [num_ranks], written by a query: 1 where the program or the verdict masks
};

}  // namespace deep_ep
