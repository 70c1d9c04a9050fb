// The send part of the low-latency dispatch: dispatch.cu says which block does what.
#pragma once

#include "kernels/low_latency/peers.hpp"
#include "kernels/primitives/numeric.hpp"

namespace deep_ep::device::low_latency {

struct DispatchShared : CallShared {
  int num_experts;
  std::size_t stage_bytes;  ///< 0 where nothing is sent
  /// Addresses of the current token's row in the windows of its ranks.
  std::byte** destinations = carver.take<std::byte*>(kMaxTopk);
  std::byte** heaps = carver.take<std::byte*>(num_ranks);  ///< sending
  /// Sending: tokens counted so far that go to each rank. Receiving: rows of each source.
  std::uint32_t* rows = carver.take<std::uint32_t>(num_ranks);
  /// Behind `rows`. Sending: entries counted so far that name each expert. Receiving, [rank][local expert]: rows that
  /// each source has for each of our experts, then where they begin.
  std::uint32_t* entries = carver.take<std::uint32_t>(num_experts);
  /// Behind `entries`, by rails. Receiving: rows of each source that this rank hands on. In blocks that post: tokens
  /// counted so far that go to each node.
  std::uint32_t* relayed = carver.take<std::uint32_t>(num_ranks);
  std::byte* stage = carver.take<std::byte>(stage_bytes, kLine);  ///< the row to send, without tags
  std::size_t bytes = carver.bytes();
};

// A warp has the header in the lines that it loads at once: the token, and of each selection expert and slot or weight.
static_assert(sizeof(std::uint32_t) * (1 + 2 * kMaxTopk) <= kWarpLines * kTaggedPayload);

/// Word `word` of the header, or of scales, of whose lines each lane has a part; another one in every lane. By a whole
/// warp.
DEEP_EP_DEVICE std::uint32_t header_word(const Cell& head, int word) {
  const std::uint32_t at = 4 * static_cast<std::uint32_t>(word);
  const std::uint32_t in_line = at % kTaggedPayload;
  const int holder = static_cast<int>(at / kTaggedPayload * kLineLanes + in_line / 16);
  const std::uint64_t low = warp::shuffle(head.payload, holder);
  const std::uint64_t high = warp::shuffle(head.epoch, holder);
  const std::uint64_t both = in_line % 16 < 8 ? low : high;
  return static_cast<std::uint32_t>(at % 8 == 0 ? both : both >> 32);
}

/// The largest magnitude of the channels of so many neighbouring lanes: of the finite ones (0 where there are none), or
/// of all, infinity and above it NaN included.
template <int kLanes>
DEEP_EP_DEVICE float largest_magnitude(const Vec16& value, bool finite) {
  const std::uint32_t raised = finite ? kBf16RaisesFinite : 0;
  std::uint32_t amax = 0;
  for (int i = 0; i < 4; ++i) {
    const std::uint32_t pair = bf16_magnitudes(value.word[i], raised);
    const std::uint32_t low = pair & 0xffffu;
    const std::uint32_t high = pair >> 16;
    amax = low > amax ? low : amax;
    amax = high > amax ? high : amax;
  }
  for (int distance = kLanes / 2; distance > 0; distance /= 2) {
    const std::uint32_t other = warp::shuffle_xor(amax, distance);
    amax = other > amax ? other : amax;
  }
  return bf16_low(amax < raised ? 0 : amax - raised);
}

/// The eight channels, each as `scaled` makes it, as float8_e4m3, the first in the lowest byte.
template <class Scaled>
DEEP_EP_DEVICE std::uint64_t to_e4m3(const Vec16& value, Scaled scaled) {
  std::uint32_t words[2];
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t a = value.word[2 * i];
    const std::uint32_t b = value.word[2 * i + 1];
    words[i] = static_cast<std::uint32_t>(pack_e4m3(scaled(bf16_low(a)), scaled(bf16_high(a)))) |
               static_cast<std::uint32_t>(pack_e4m3(scaled(bf16_low(b)), scaled(bf16_high(b)))) << 16;
  }
  return static_cast<std::uint64_t>(words[1]) << 32 | words[0];
}

/// The first cell of the counts: rows, rows to hand on (by rails), and a check that the ranks mean the same call.
struct CountHead {
  std::uint16_t rows, relayed;  ///< at most kMostLowLatencyTokens
  std::uint32_t call_shape;
};

template <bool kRdma>
struct DispatchSender {
  const LowLatencyDispatchParams& params;
  const DispatchShared& shared;
  LowLatencyRow row;

  // Loaded early, see load().
  int token = 0;
  Vec16 vector{};
  TopkIndices::Words own = {};    ///< of the deciding warp: the lane's selection of the token
  float own_weight = 0.0f;        ///< and its weight, if weights travel
  TopkIndices::Words other = {};  ///< of the first tokens to count
  float global_scale = 1.0f;      ///< of nvfp4

  DEEP_EP_DEVICE std::uint64_t epoch() const { return shared.words->epochs.send; }
  DEEP_EP_DEVICE DispatchCall<kRdma> call() const { return {params.common, epoch(), row.bytes()}; }

  /// Starts all loads that the next token needs, of `counted` tokens that are counted already.
  DEEP_EP_DEVICE void load(int next, int counted) {
    token = next;
    if (token >= params.num_tokens) return;
    vector = load_vector(thread_index());
    global_scale = params.global_scale != nullptr ? load_stream(params.global_scale) : 1.0f;
    const std::int64_t at = std::int64_t{token} * params.num_topk + lane_index();
    const bool has_own = decides() && lane_index() < params.num_topk;
    own = has_own ? params.topk_idx.load_words(at) : TopkIndices::Words{};
    if (row.weighted && has_own) own_weight = load_stream(params.combine_weights + at);
    other = load_selection(counted, token);
  }

  // ---- Counts over the tokens before it give a token's slot at each destination, and its place among the rows of each
  // expert. Every block counts for itself: reading a few hundred selections takes less time than exchanging results. A
  // warp counts whole tokens, each lane one selection. ----

  DEEP_EP_DEVICE int tokens_of_warp() const { return kWarpSize / params.num_topk; }
  /// The lane's selection of the token that it counts if the block's first one is `begin`; -1 where that is not before
  /// `end`. Separate from count, so that the load can be under way early.
  DEEP_EP_DEVICE TopkIndices::Words load_selection(int begin, int end) const {
    const int of_warp = lane_index() / params.num_topk;
    const int counted =
        of_warp < tokens_of_warp() ? begin + warp_index() * tokens_of_warp() + of_warp : params.num_tokens;
    if (counted >= end) return {};
    return params.topk_idx.load_words(std::int64_t{counted} * params.num_topk + lane_index() % params.num_topk);
  }

  /// Is the lane's selection, which falls to `part` (a rank, a node; negative: none), the first of its token that does?
  /// By whole warps.
  DEEP_EP_DEVICE bool is_first(int part) const {
    const int of_token = lane_index() / params.num_topk << 16;
    const std::uint32_t same = warp::match_any(static_cast<std::uint32_t>(part < 0 ? -1 : of_token | part));
    return part >= 0 && lowest_bit(same) == lane_index();
  }

  /// By whole blocks, which sync after it.
  DEEP_EP_DEVICE void clear_counts() const {
    const int ranks = params.common.num_ranks;
    block::each(ranks + params.num_experts() + (kRdma ? ranks : 0),
                [&](int i) { shared.rows[i] = 0; });  // and behind it
  }
  /// By whole blocks, which sync after it: counts the selections of the tokens from `begin` to before `end`, of which
  /// load_selection(begin, end) has loaded the first. `nodes`: and the tokens that go to each node.
  DEEP_EP_DEVICE void count(int begin, int end, bool nodes = false) const {
    const int step = tokens_of_warp() * block_warps();
    TopkIndices::Words first = other;
#pragma unroll 1
    for (; begin < end; begin += step) {
      const auto next = begin + step < end ? load_selection(begin + step, end) : TopkIndices::Words{};
      const int expert = expert_of(params.topk_idx.index_of(first), params.num_experts());
      const int rank = params.rank_of(expert);
      if (is_first(rank)) add_relaxed<Scope::block>(shared.rows + rank, 1);
      if (expert >= 0) add_relaxed<Scope::block>(shared.entries + expert, 1);
      if (nodes) {
        const int node = rank < 0 ? -1 : rank / params.common.rail_width;
        if (is_first(node)) add_relaxed<Scope::block>(shared.relayed + node, 1);
      }
      first = next;
    }
  }

  /// Has a token an expert on one of `count` ranks from `first_rank` on?
  DEEP_EP_DEVICE bool goes_to(int of_token, int first_rank, int count) const {
    bool goes = false;
    for (int k = 0; k < params.num_topk; ++k) {
      const auto selected = params.topk_idx.load_words(std::int64_t{of_token} * params.num_topk + k);
      const int rank = params.rank_of(expert_of(params.topk_idx.index_of(selected), params.num_experts()));
      goes = goes || (rank >= first_rank && rank < first_rank + count);
    }
    return goes;
  }

  // ---- The row of a token. The whole block takes part; each thread handles eight channels (a vector) at a time. ----

  static constexpr int kVectorChannels = 8;

  DEEP_EP_DEVICE int vectors() const { return params.hidden / kVectorChannels; }
  DEEP_EP_DEVICE Vec16 load_vector(int at) const {
    const auto* x = reinterpret_cast<const Vec16*>(params.x + std::int64_t{token} * params.hidden * 2);
    return at < vectors() ? load_stream(x + at) : Vec16{};
  }
  template <class T>
  DEEP_EP_DEVICE T* payload() const {
    return reinterpret_cast<T*>(shared.stage + row.payload_at());
  }

  DEEP_EP_DEVICE void write_row() const {
    Vec16 now = vector;
    // Whole warps stay in the loop: lanes compare their channels.
#pragma unroll 1
    for (int base = thread_index() - lane_index(); base < vectors(); base += block_threads()) {
      const int at = base + lane_index();
      const Vec16 next = load_vector(at + block_threads());
      if (row.nvfp4()) {
        write_nvfp4(at, now);
      } else if (row.scaled()) {
        write_fp8(at, now);
      } else if (at < vectors()) {
        payload<Vec16>()[at] = now;
      }
      now = next;
    }
  }
  DEEP_EP_DEVICE void write_fp8(int at, const Vec16& value) const {
    constexpr int kLanes = kScaleChannels / kVectorChannels;
    const bool power_of_two =
        row.format == LowLatencyFormat::fp8_round_scale || row.format == LowLatencyFormat::fp8_ue8m0;
    const float amax = largest_magnitude<kLanes>(value, power_of_two);
    const Fp8Scale scale = fp8_scale(amax, power_of_two);
    if (at >= vectors()) return;
    float inverse = scale.inverse;
    if (row.format == LowLatencyFormat::fp8_aligned) {
      inverse = aligned_fp8_scale(amax);
      payload<std::uint64_t>()[at] = to_e4m3(value, [&](float x) { return x / inverse; });
    } else {
      payload<std::uint64_t>()[at] = to_e4m3(value, [&](float x) { return x * scale.multiplier; });
    }
    if (at % kLanes == 0) reinterpret_cast<float*>(shared.stage + row.scales_at())[at / kLanes] = inverse;
  }
  DEEP_EP_DEVICE void write_nvfp4(int at, const Vec16& value) const {
    constexpr int kLanes = kNvfp4ScaleChannels / kVectorChannels;
    const float amax = largest_magnitude<kLanes>(value, false);
    if (at >= vectors()) return;
    const Nvfp4Scale scale = nvfp4_scale(amax, global_scale);
    std::uint32_t codes = 0;
    for (int i = 0; i < 4; ++i) {
      codes |= e2m1(bf16_low(value.word[i]) * scale.multiplier) << (8 * i);
      codes |= e2m1(bf16_high(value.word[i]) * scale.multiplier) << (8 * i + 4);
    }
    payload<std::uint32_t>()[at] = codes;
    if (at % kLanes == 0) shared.stage[row.scales_at() + at / kLanes] = static_cast<std::byte>(scale.e4m3);
  }

  /// The last warp decides where rows go: it seldom has any channels of the row to write.
  DEEP_EP_DEVICE static bool decides() { return warp_index() == block_warps() - 1; }

  /// The deciding warp finds where the token's row goes, and writes its header into the stage.
  DEEP_EP_DEVICE void decide() const {
    const int lane = lane_index();
    const int expert = expert_of(params.topk_idx.index_of(own), params.num_experts());
    const int rank = params.rank_of(expert);
    const std::uint32_t below = (1u << lane) - 1;

    const std::uint32_t same_expert = warp::match_any(static_cast<std::uint32_t>(expert));
    const std::uint32_t same_rank = warp::match_any(static_cast<std::uint32_t>(rank));
    const bool leads = expert >= 0 && lowest_bit(same_rank) == lane && !masked(params.common, rank);
    const DispatchCall<kRdma> call = this->call();
    const std::uint32_t far = kRdma ? warp::ballot(leads && call.is_far(rank)) : 0;
    std::byte* to = nullptr;
    if (far != 0 && lane == lowest_bit(far)) {  // once for all of these
      to = call.staged_row(params.common.num_ranks, token).in(params.common.local);
    } else if (leads && !call.is_far(rank) && call.await_room(rank, shared.acknowledged[rank])) {
      to = call.row(params.common.rank, static_cast<int>(shared.rows[rank])).in(shared.heaps[rank]);
    }
    const std::uint32_t stored = warp::ballot(to != nullptr);
    if (to != nullptr) shared.destinations[count_bits(stored & below)] = to;
    auto* header = reinterpret_cast<std::uint32_t*>(shared.stage);
    if (lane == 0) {
      shared.words->destinations = count_bits(stored);
      header[LowLatencyRow::kToken] = static_cast<std::uint32_t>(token);
    }

    if (lane >= params.num_topk) return;
    const std::uint32_t place =
        expert < 0 ? 0 : shared.entries[expert] + static_cast<std::uint32_t>(count_bits(same_expert & below));
    header[row.selection_word(lane)] =
        place << 16 | (expert < 0 ? LowLatencyRow::kNoExpert : static_cast<std::uint32_t>(expert));
    if (row.by_rails) header[row.second_word(lane)] = expert < 0 ? 0 : shared.rows[rank];
    if (row.weighted) header[row.second_word(lane)] = bits_of(own_weight);
  }

  DEEP_EP_DEVICE Cell part(std::uint32_t line) const {
    if (line < row.head_lines()) return tagged_part(shared.stage, line, epoch());
    line -= row.head_lines();
    const int at = LineLane().vector(line);
    return tagged_part(at < row.vectors() ? payload<Vec16>()[at] : Vec16{}, line, epoch());
  }

  /// Stores the stage to each destination. A warp takes a few lines of the row and stores them everywhere, so that all
  /// links are busy from the beginning.
  DEEP_EP_DEVICE void store() const {
    const int destinations = shared.words->destinations;
    const LineLane lane;
#pragma unroll 1
    for (std::uint32_t first = static_cast<std::uint32_t>(warp_index()) * kWarpLines; first < row.lines();
         first += static_cast<std::uint32_t>(block_warps()) * kWarpLines) {
      const std::uint32_t line = first + static_cast<std::uint32_t>(lane.line);
      const bool wanted = line < row.lines();
      const Cell part = wanted ? this->part(line) : Cell{};
#pragma unroll 1
      for (int i = 0; i < destinations; ++i) store_line(shared.destinations[i] + lane.byte_at(line), part, wanted);
    }
  }

  /// Sends all tokens of this block, the first of which is loaded. The counts are zero.
  DEEP_EP_DEVICE void send_tokens(int step) {
    int counted = 0;
#pragma unroll 1
    while (token < params.num_tokens) {
      // 1. Count what the tokens before it select.
      count(counted, token);
      counted = token;
      if (token != 0) block::sync();  // the counts are complete, and the previous token's row has left the stage
      // 2. Make the row as it travels.
      if (decides()) decide();
      write_row();
      block::sync();
      // 3. Send it; for far ranks it is in the staging memory then.
      store();
      if (kRdma) {
        block::sync();
        if (warp_index() == 0) call().hand_over(params.common.num_ranks, token);
      }
      load(token + step, counted);
    }
  }

  /// A cell of the counts for one rank, when all tokens are counted.
  DEEP_EP_DEVICE std::uint64_t count_payload(int rank, int cell, std::uint32_t relayed = 0) const {
    const std::uint32_t* entries = shared.entries + rank * params.num_local_experts;
    const int local = 2 * (cell - 1);
    if (cell == 0) {
      return __builtin_bit_cast(std::uint64_t, CountHead{static_cast<std::uint16_t>(shared.rows[rank]),
                                                         static_cast<std::uint16_t>(relayed), params.call_shape});
    }
    const std::uint64_t second = local + 1 < params.num_local_experts ? entries[local + 1] : 0;
    return second << 32 | entries[local];
  }

  /// By block 0, when all tokens are counted: tells every rank how many rows and entries it gets, once there is room.
  DEEP_EP_DEVICE void send_counts() const {
    const Divisor& cells = params.count_cells;
    block::each(cells * params.common.num_ranks, [&](int i) {
      const int rank = i / cells;
      const int cell = i % cells;
      if (call().is_far(rank) || masked(params.common, rank)) return;
      if (!call().await_room(rank, shared.acknowledged[rank])) return;
      const Place<Cell> to = params.common.window.counts.at(epoch(), params.common.rank, cell);
      store_cell(to.in(shared.heaps[rank]), count_payload(rank, cell), epoch());
    });
  }
};

}  // namespace deep_ep::device::low_latency
