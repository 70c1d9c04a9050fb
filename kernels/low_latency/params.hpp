// Arguments of the low-latency kernels. Plain data: host code fills it, kernels read it.
#pragma once

#include <cstdint>

#include "kernels/common/call.hpp"
#include "kernels/common/topk.hpp"
#include "kernels/low_latency/window.hpp"
#include "kernels/primitives/line.hpp"
#include "kernels/rdma/reach.hpp"

namespace deep_ep {

constexpr int kMostLowLatencyTokens = 65535;   ///< what a selection's place can count
constexpr int kMostLowLatencyExperts = 65535;  ///< what a selection can name; 0xffff is none

// The largest numbers that kernels divide count the rows of all ranks, a few more than there are: see Divisor.
static_assert(std::uint64_t{kMaxRanks} * kMaxRanks * (kMostLowLatencyTokens + 1) < std::uint64_t{1} << 31);

/// The parts of a call: one kernel does both, or a kernel each.
enum class LowLatencyPhase : int { send = 1, receive = 2, both = 3 };

DEEP_EP_HOST_DEVICE constexpr bool sends(LowLatencyPhase phase) { return (static_cast<int>(phase) & 1) != 0; }
DEEP_EP_HOST_DEVICE constexpr bool receives(LowLatencyPhase phase) { return (static_cast<int>(phase) & 2) != 0; }

/// Which call a kernel sends, and which one it receives.
struct LowLatencyEpochs {
  std::uint64_t send, receive;
};

/// How one kind of call is counted, in this rank's device memory. Zero when the buffer is made.
struct LowLatencyCounters {
  CallCount sent;          ///< calls whose send part has run
  CallCount received;      ///< calls whose receive part has run
  std::uint32_t arrived;   ///< blocks of this kernel that know which call it is; the last one resets it to zero
  std::uint32_t finished;  ///< blocks that have received (masking), or are done (unreduced combine); reset by the last
  /// With masking: sum of what the blocks of this kernel saw as ControlState::version; the last one resets it to zero.
  std::uint64_t versions;

  /// By one thread of a block: ask once, so that the word is not what all warps of the GPU meet at.
  DEEP_EP_DEVICE LowLatencyEpochs epochs() const { return {sent.epoch(), received.epoch()}; }
  /// By one thread of every block, after epochs() and whenever it has time: the last one counts the call.
  DEEP_EP_DEVICE void arrive(const LowLatencyEpochs& epochs, LowLatencyPhase phase) {
    const auto blocks = static_cast<std::uint32_t>(device::grid_blocks());
    if (!device::last_to_arrive<device::Scope::gpu>(&arrived, blocks)) return;
    if (sends(phase)) sent.count(epochs.send);
    if (receives(phase)) received.count(epochs.receive);
  }
};

struct LowLatencyState {
  LowLatencyCounters counters[kLowLatencyKinds];
  CallCount barriers;
  std::uint64_t abort;  ///< see WaitContext; of low-latency calls only
};

/// A rank has a queue pair for each peer and channel, so that no two kernels that may run at once share one: these,
/// then for each further lane one of each kind of calls.
enum class LowLatencyChannel : int { dispatch, combine, barrier, count };
DEEP_EP_HOST_DEVICE constexpr int channel_of(LowLatencyKind kind, int lane) {
  if (lane == 0) return static_cast<int>(kind);
  return static_cast<int>(LowLatencyChannel::count) + (lane - 1) * static_cast<int>(kLowLatencyKinds) +
         static_cast<int>(kind);
}
DEEP_EP_HOST_DEVICE constexpr int low_latency_channels(int lanes) {
  return channel_of(LowLatencyKind::dispatch, lanes);
}
static_assert(channel_of(LowLatencyKind::combine, 0) == static_cast<int>(LowLatencyChannel::combine) &&
              low_latency_channels(1) == static_cast<int>(LowLatencyChannel::count));

/// What a far rank has been told: the words that this rank adds to in its window, once all that was posted has arrived.
struct LowLatencyTold {
  LowLatencyMailbox mailbox[kLowLatencyKinds];
  std::uint64_t barrier;
};

/// With masking a wait ends when its peer is masked. A wait that lasts for so many time-outs ends the call: ranks have
/// mixed up their calls.
constexpr int kMostTimeouts = 8;

/// What every kernel of the family gets.
struct LowLatencyParams : ReachParams {
  LowLatencyWindow window;
  LowLatencyStaging staging;       ///< where somebody is far
  LowLatencyTold* told = nullptr;  ///< [num_ranks], device memory; where somebody is far
  LowLatencyState* state = nullptr;
  WaitContext wait;
  WaitContext posts;              ///< of waits for queue pairs: with masking a failed one does not end the call
  std::uint64_t* mask = nullptr;  ///< ControlState::mask. nullptr: ranks are never masked

  DEEP_EP_DEVICE LowLatencyCounters& counters(LowLatencyKind kind) const {
    return state->counters[static_cast<int>(kind)];
  }
};

/// What a handle knows of a dispatch and the rows that it received: [2 + M + M * K, R] int32, in this order.
struct LowLatencyRowTable {
  static constexpr std::int32_t kNoRoom = -2;

  std::int32_t* base;
  int num_ranks, max_tokens, num_topk;

  /// Rows that came from `source`.
  DEEP_EP_HOST_DEVICE std::int32_t* rows(int source) const { return base + source; }
  /// The row's token at its source.
  DEEP_EP_HOST_DEVICE std::int32_t* token(int source, int row) const { return base + num_ranks + at(source, row); }
  /// Where in recv_x, counted in rows, selection `k` of the row lies; -1: on another rank;
  /// kNoRoom: the expert has more rows than fit. expert_major: in block
  /// position / (R * M), which is the local expert. rank_major: the same row for every selection.
  DEEP_EP_HOST_DEVICE std::int32_t* position(int source, int row, int k) const {
    return base + num_ranks + std::int64_t{num_ranks} * max_tokens + at(source, row) * num_topk + k;
  }
  /// The low half of the dispatch's number, which is the same on all ranks.
  DEEP_EP_HOST_DEVICE std::int32_t* epoch() const { return position(0, num_ranks * max_tokens, 0); }

 private:
  DEEP_EP_HOST_DEVICE std::int64_t at(int source, int row) const { return std::int64_t{source} * max_tokens + row; }
};

/// Form of the rows that a dispatch sends.
/// The last four are made by kernels with extras only.
enum class LowLatencyFormat : int {
  bf16,
  fp8,
  fp8_round_scale,
  fp8_ue8m0,
  fp8_token,
  fp8_token_round_scale,
  nvfp4,
  fp8_aligned
};

DEEP_EP_HOST_DEVICE constexpr bool has_scales(LowLatencyFormat format) { return format != LowLatencyFormat::bf16; }
DEEP_EP_HOST_DEVICE constexpr bool is_extra(LowLatencyFormat format) { return format >= LowLatencyFormat::fp8_token; }
/// A row has one scale.
DEEP_EP_HOST_DEVICE constexpr bool is_of_token(LowLatencyFormat format) {
  return format == LowLatencyFormat::fp8_token || format == LowLatencyFormat::fp8_token_round_scale;
}

/// Channels that share a scale.
constexpr int kScaleChannels = 128;
constexpr int kNvfp4ScaleChannels = 16;  ///< a scale is a byte: four of them in a word

/// A row of dispatch as it travels, in tagged lines: a header of words (the token's index at its source, for each
/// selection the expert and its place among the source's entries that name this expert, weights, and by rails the row's
/// slot on the expert's rank), words of scales (float32, also for UE8M0; NVFP4: four E4M3), payload.
struct LowLatencyRow {
  int hidden, num_topk;
  bool scaled, weights;
  bool by_rails = false;
  bool of_token = false, nvfp4 = false, aligned = false;  ///< known to be false in plain kernels: see row()

  // Words of the header.
  static constexpr int kToken = 0;
  DEEP_EP_HOST_DEVICE int selection_word(int k) const { return 1 + k; }
  DEEP_EP_HOST_DEVICE int weight_word(int k) const { return 1 + num_topk + k; }
  DEEP_EP_HOST_DEVICE int slot_word(int k) const { return 1 + num_topk * (weights ? 2 : 1) + k; }
  DEEP_EP_HOST_DEVICE int header_words() const { return 1 + num_topk * (1 + (weights ? 1 : 0) + (by_rails ? 1 : 0)); }

  // Offsets in the row, without tags.
  DEEP_EP_HOST_DEVICE std::uint32_t scales_at() const { return 4 * static_cast<std::uint32_t>(header_words()); }
  DEEP_EP_HOST_DEVICE std::uint32_t scale_words() const {
    if (nvfp4) return static_cast<std::uint32_t>(hidden) / (4 * kNvfp4ScaleChannels);
    if (of_token) return 1;
    return scaled ? static_cast<std::uint32_t>(hidden) / kScaleChannels : 0;
  }
  DEEP_EP_HOST_DEVICE std::uint32_t scales_end() const { return scales_at() + scale_words() * 4; }
  DEEP_EP_HOST_DEVICE std::uint32_t payload_at() const { return (scales_end() + 7) / 8 * 8; }
  DEEP_EP_HOST_DEVICE std::uint32_t payload_bytes() const {
    if (nvfp4) return static_cast<std::uint32_t>(hidden) / 2;
    return static_cast<std::uint32_t>(hidden) * (scaled ? 1 : 2);
  }
  DEEP_EP_HOST_DEVICE std::uint32_t data_bytes() const { return payload_at() + payload_bytes(); }

  DEEP_EP_HOST_DEVICE std::uint32_t lines() const { return tagged_lines(data_bytes()); }
  /// In the window, with tags.
  DEEP_EP_HOST_DEVICE std::uint32_t bytes() const { return lines() * kTaggedLine; }
  /// In shared memory, without tags: whole lines of payload, aligned for what lies behind.
  DEEP_EP_HOST_DEVICE std::uint32_t stage_bytes() const { return (lines() * kTaggedPayload + 15) / 16 * 16; }

  static constexpr std::uint32_t kNoExpert = 0xffff;
  /// A selection in one word: expert in the lower half, place in the upper.
  DEEP_EP_HOST_DEVICE static std::uint32_t pack(std::uint32_t expert, std::uint32_t place) {
    return expert | place << 16;
  }
};

/// Scales of received rows, as grouped GEMMs load them: [blocks][columns][rows] words of 32 bits, with blocks and rows
/// as in recv_x. A word is a float, or with UE8M0 the exponents of four neighbouring scales.
struct LowLatencyScales {
  std::uint32_t scales;  ///< of a row
  int rows;              ///< of a block
  bool packed;

  DEEP_EP_HOST_DEVICE int columns() const { return static_cast<int>(packed ? scales / 4 : scales); }
  /// The first word of a row.
  DEEP_EP_HOST_DEVICE std::int64_t first(int block, int row) const {
    return std::int64_t{block} * columns() * rows + row;
  }
  /// How far behind it the word with scale `index` lies.
  DEEP_EP_HOST_DEVICE std::int64_t behind(std::uint32_t index) const {
    return std::int64_t{packed ? index / 4 : index} * rows;
  }
};

/// Scales of NVFP4 rows, as tensor cores of sm_100 load them: [blocks][tiles of 128 rows][columns] tiles of 512 bytes.
/// In a tile, the four scales (a word) of row r, of 64 channels, lie at 16 * (r % 32) + 4 * (r / 32).
struct LowLatencyTiledScales {
  static constexpr int kTileRows = 128;
  int columns;  ///< of words
  int rows;     ///< of a block

  DEEP_EP_HOST_DEVICE int tiles() const { return (rows + kTileRows - 1) / kTileRows; }
  /// The first word of a row; the others lie kTileRows words behind each other.
  DEEP_EP_HOST_DEVICE std::int64_t first(int block, int row) const {
    const std::int64_t tile = std::int64_t{block} * tiles() + row / kTileRows;
    return tile * columns * kTileRows + row % 32 * 4 + row % kTileRows / 32;
  }
};

/// A rank that has met an unknown expert sets this bit in the call_shape that it sends. No valid call has the bit, so
/// the call ends on all ranks.
constexpr std::uint32_t kUnknownExpertShape = 1u << 31;

struct LowLatencyDispatchParams {
  LowLatencyParams common;
  LowLatencyPhase phase;

  // Equal on all ranks.
  int max_tokens;
  Divisor num_topk;
  int hidden;
  Divisor num_local_experts;
  Divisor count_cells;  ///< that tell one rank how many rows it gets: one, and one for each two of its experts
  LowLatencyFormat format;
  bool rank_major;
  bool weights;              ///< top-k weights travel with the rows
  std::uint32_t call_shape;  ///< a hash of the above, without kUnknownExpertShape: ranks that disagree find out
  Divisor warps_per_row;     ///< of the receive part; divides the warps of a block

  // What is sent.
  int num_tokens;
  const std::byte* x;    ///< [num_tokens, hidden] bfloat16
  TopkIndices topk_idx;  ///< [num_tokens, num_topk]
  bool report_unknown_experts;
  const float* topk_weights;  ///< [num_tokens, num_topk], nullptr: none

  /// A row as it travels, directly or by rails. kExtra: it may have any format; else those of plain kernels.
  template <bool kExtra = true>
  DEEP_EP_HOST_DEVICE LowLatencyRow row(bool by_rails) const {
    return {hidden,
            num_topk,
            has_scales(format),
            weights,
            by_rails,
            kExtra && is_of_token(format),
            kExtra && format == LowLatencyFormat::nvfp4,
            kExtra && format == LowLatencyFormat::fp8_aligned};
  }

  // What is received: R = num_ranks, M = max_tokens, L = num_local_experts.
  DEEP_EP_HOST_DEVICE int recv_blocks() const { return rank_major ? common.num_ranks : num_local_experts; }
  DEEP_EP_HOST_DEVICE int block_rows() const { return rank_major ? max_tokens : common.num_ranks * max_tokens; }
  DEEP_EP_HOST_DEVICE LowLatencyScales scale_layout() const {
    return {static_cast<std::uint32_t>(hidden) / kScaleChannels, block_rows(), format == LowLatencyFormat::fp8_ue8m0};
  }
  DEEP_EP_HOST_DEVICE LowLatencyTiledScales tiled_scales() const {
    return {hidden / (4 * kNvfp4ScaleChannels), block_rows()};
  }
  std::byte* recv_x;            ///< [L, R * M] or [R, M] rows
  std::byte* recv_scales;       ///< [L, hidden / 128 (UE8M0: / 512), R * M] or [R, .., M] words; nullptr: bf16
  std::int32_t* recv_count;     ///< [L] or [R]
  std::int32_t* src_info;       ///< [L, R * M] or [R, M]
  std::int64_t* layout_range;   ///< [L, R] or [R]
  std::int32_t* row_table;      ///< see LowLatencyRowTable
  std::int32_t* recv_topk_idx;  ///< rank_major: [R, M, K]
  float* recv_topk_weights;     ///< rank_major with weights: [R, M, K]
  std::int32_t* recv_stats;     ///< [L], added to; nullptr: none
  std::int64_t* wait_cost;      ///< [R], added to; nullptr: none

  // Behind all else: only kernels with extras look at these.
  std::int64_t* arrivals;  ///< [L or R, arrival_words], added to: see deep_ep/arrivals.hpp; nullptr: none
  int arrival_words;
  int arrival_shift;          ///< a word stands for 1 << arrival_shift rows
  const float* global_scale;  ///< [1], of nvfp4; nullptr: 1
};

/// By which the program tells the send part of a combine which rows of x are there: see LowLatencyOverlap.
struct LowLatencySignals {
  const std::uint32_t* words = nullptr;  ///< [local experts, words_of_expert]; nullptr: all rows are there
  int words_of_expert = 1;
  int rows_of_word = 0;
  std::uint32_t expected = 0;  ///< a word says so once it is at least this
  int selections = 0;          ///< that may fall to a block, at most
};

struct LowLatencyCombineParams {
  LowLatencyParams common;
  LowLatencyPhase phase;

  // Equal on all ranks.
  int max_tokens;
  Divisor num_topk;
  int hidden;
  Divisor num_local_experts;
  bool rank_major;
  bool fp8;                  ///< rows travel as 128 channels in e4m3 with a float32 scale; else in bfloat16
  std::uint32_t row_bytes;   ///< of a row as it travels
  std::uint32_t call_shape;  ///< a hash of the above: ranks that disagree find out

  Divisor block_warps;
  Divisor warps_per_row;  ///< that push a row together
  int rows_of_group;      ///< of so many warps, at most; 0 without a send part

  // As expert side: what is sent.
  const std::byte* x;             ///< rows as dispatch laid them out, bfloat16
  const std::int32_t* row_table;  ///< see LowLatencyRowTable

  // As owner: what is added up.
  int num_tokens;
  TopkIndices topk_idx;  ///< [num_tokens, num_topk]
  bool report_unknown_experts;
  const float* topk_weights;  ///< [num_tokens, num_topk]
  std::byte* combined_x;      ///< [num_tokens, hidden] bfloat16
  std::int64_t* wait_cost;    ///< [R], added to; nullptr: none

  LowLatencySignals signals;  ///< of calls that go unreduced, and only their send part
};

struct LowLatencyBarrierParams {
  LowLatencyParams common;
  bool drains = false;  ///< when it ends, all RDMA operations of earlier calls have arrived
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
