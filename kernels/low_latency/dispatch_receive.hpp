// The receive part of the low-latency dispatch: rows come into [source][slot] of the window, and go from there to the
// experts that they are for. A few warps share a row, by lines; each polls its own, and has them in registers when they
// are there.
#pragma once

#include "kernels/low_latency/dispatch_send.hpp"

namespace deep_ep::device {

/// What one block does beside receiving rows.
struct ReceiverRole {
  bool writes = false;    ///< counts and ranges, for the caller and combine
  bool adds = false;      ///< to the caller's statistics
  bool measures = false;  ///< how long it waits for each source
};

struct LowLatencyReceiver {
  const LowLatencyDispatchParams& params;
  const LowLatencyDispatchShared& layout;
  std::byte* memory;
  LowLatencyRow row;

  static constexpr int kBatch = 4;  ///< parts of a row that a lane holds: an FP8 row of 7168 channels in four warps

  DEEP_EP_DEVICE std::uint64_t epoch() const { return layout.words(memory).received + 1; }
  DEEP_EP_DEVICE int capacity() const { return params.common.num_ranks * params.max_tokens; }
  DEEP_EP_DEVICE std::uint32_t& entries(int source, int local) const {
    return layout.entries(memory)[source * params.num_local_experts + local];
  }
  DEEP_EP_DEVICE bool left_out(int source) const {
    return load_relaxed<Scope::block>(&layout.left_out(memory)[source]) != 0;
  }

  // ---- Counts ----

  /// Waits for one cell of `source`'s counts, and puts it into shared memory.
  DEEP_EP_DEVICE void learn(int source, int cell, const ReceiverRole& role) const {
    const LowLatencyParams& common = params.common;
    if (left_out(source)) return;
    const auto* cells = reinterpret_cast<const Cell*>(common.local + common.window.counts_at(epoch(), source));
    std::uint64_t payload = 0;
    const bool costs = role.measures && cell == 0 && params.wait_cost != nullptr;
    const std::int64_t begin = costs ? clock_cycles() : 0;
    if (!wait_for_cell(common, cells + cell, epoch(), source, Wanted::low_latency_dispatch_counts, payload)) {
      store_relaxed<Scope::block>(&layout.left_out(memory)[source], 1);
      return;
    }
    if (costs) params.wait_cost[source] += clock_cycles() - begin;
    if (cell > 0) {
      const int local = 2 * (cell - 1);
      entries(source, local) = static_cast<std::uint32_t>(payload);
      if (local + 1 < params.num_local_experts) entries(source, local + 1) = static_cast<std::uint32_t>(payload >> 32);
      return;
    }
    layout.rows(memory)[source] = static_cast<std::uint32_t>(payload);
    if (payload >> 32 != params.call_shape) {
      report_fault(common.wait, FaultKind::mismatch, Wanted::low_latency_dispatch_counts, source, 0, params.call_shape,
                   payload >> 32);
    }
  }

  /// From rows of each source to where they begin, for one of our experts.
  DEEP_EP_DEVICE void add_up(int local, const ReceiverRole& role) const {
    const int num_ranks = params.common.num_ranks;
    const auto most = static_cast<std::uint32_t>(capacity());
    std::uint32_t end = 0;
    bool overflow = false;
    for (int source = 0; source < num_ranks; ++source) {
      const std::uint32_t begin = end;
      const std::uint32_t sent = left_out(source) ? 0 : entries(source, local);
      const std::uint32_t taken = sent < most - begin ? sent : most - begin;
      overflow = overflow || taken < sent;
      end = begin + taken;
      entries(source, local) = begin;
      if (role.writes && !params.rank_major) {
        params.layout_range[std::int64_t{local} * num_ranks + source] =
            static_cast<std::int64_t>(static_cast<std::uint64_t>(begin) << 32 | taken);
      }
    }
    if (role.adds && params.recv_stats != nullptr) params.recv_stats[local] += static_cast<std::int32_t>(end);
    if (!role.writes || params.rank_major) return;
    params.recv_count[local] = static_cast<std::int32_t>(end);
    if (overflow) {
      note_fault(params.common.wait, FaultKind::overflow, Wanted::low_latency_dispatch_rows, params.common.rank, local,
                 most + 1, most);
    }
  }

  /// The rows of one source.
  DEEP_EP_DEVICE void settle(int source, const ReceiverRole& role) const {
    std::uint32_t& rows = layout.rows(memory)[source];
    if (left_out(source)) rows = 0;
    if (!role.writes) return;
    *table().rows(source) = static_cast<std::int32_t>(rows);
    if (params.rank_major) {
      params.recv_count[source] = static_cast<std::int32_t>(rows);
      params.layout_range[source] = static_cast<std::int64_t>(rows);
    }
  }

  /// Learns how many rows come. Words::failed says whether the call is over.
  DEEP_EP_DEVICE void learn_counts(const ReceiverRole& role) const {
    const int num_ranks = params.common.num_ranks;
    const int cells = 1 + (params.num_local_experts + 1) / 2;
    for (int i = thread_index(); i < cells * num_ranks; i += block_threads()) learn(i / cells, i % cells, role);
    block::sync();
    if (thread_index() == 0) layout.words(memory).failed = aborted(params.common.wait) ? 1 : 0;
    for (int local = thread_index(); local < params.num_local_experts; local += block_threads()) add_up(local, role);
    for (int source = thread_index(); source < num_ranks; source += block_threads()) settle(source, role);
    block::sync();
  }

  // ---- Rows ----

  DEEP_EP_DEVICE RowTable table() const {
    return {params.row_table, params.common.num_ranks, params.max_tokens, params.num_topk};
  }

  /// All rows, where this warp is `part` of the `group`-th of `groups` groups. The sources in turn, as their rows come
  /// side by side.
  DEEP_EP_DEVICE void receive_rows(int group, int groups, int part) const {
    const int num_ranks = params.common.num_ranks;
    std::uint32_t most = 0;
    for (int source = 0; source < num_ranks; ++source) {
      const std::uint32_t rows = layout.rows(memory)[source];
      most = rows > most ? rows : most;
    }
    const int all = static_cast<int>(most) * num_ranks;
    for (int i = group; i < all; i += groups) {
      const int source = i % num_ranks;
      const int slot = i / num_ranks;
      if (static_cast<std::uint32_t>(slot) < layout.rows(memory)[source]) receive_row(source, slot, part);
    }
  }

  /// Lines of a row in one warp's registers, as they are polled.
  struct Lines {
    const std::byte* row;  ///< in the window
    std::uint64_t tag;
    std::uint32_t lines;        ///< of the row
    std::uint32_t first, step;  ///< this lane's: first, first + step ..., kBatch of them
    std::uint32_t header_line;  ///< this lane's of the header
    LinePart held[kBatch], header;
    bool there[kBatch + 1] = {};  ///< the last is the header's

    DEEP_EP_DEVICE bool is_line(int i) const { return line(i) < lines; }
    DEEP_EP_DEVICE std::uint32_t line(int i) const { return first + static_cast<std::uint32_t>(i) * step; }

    /// Loads what is not there yet. True, for the whole warp, when all is.
    DEEP_EP_DEVICE bool poll() {
      const LineLane lane;
      bool all = true;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (!there[i]) held[i] = load_line(row + lane.byte_at(line(i)), is_line(i));
      }
      if (!there[kBatch]) header = load_line(row + lane.byte_at(header_line), header_line < lines);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        there[i] = warp::all(tagged(held[i], tag) || !is_line(i));
        all = all && there[i];
      }
      there[kBatch] = warp::all(tagged(header, tag) || header_line >= lines);
      return all && there[kBatch];
    }
    DEEP_EP_DEVICE void next_batch() {
      first += step * kBatch;
      for (int i = 0; i < kBatch; ++i) there[i] = false;
    }
  };

  /// Waits until `lines` are there. False: they will not come.
  DEEP_EP_DEVICE bool await(int source, Lines& lines) const {
    return wait_for_peer_together(params.common, source, Wanted::low_latency_dispatch_rows, epoch(),
                                  [&](std::uint64_t&) { return lines.poll(); });
  }

  /// Word `word` of the header, of whose lines each lane has a part; another one in every lane.
  DEEP_EP_DEVICE std::uint32_t header_word(const LinePart& header, int word) const {
    const std::uint32_t at = row.header_at() + 4 * static_cast<std::uint32_t>(word);
    const std::uint32_t line = at / kTaggedPayload - row.header_at() / kTaggedPayload;
    const std::uint32_t in_line = at % kTaggedPayload;
    const int holder = static_cast<int>(line * kLineLanes + in_line / 16);
    const std::uint64_t low = warp::shuffle(header.word[0], holder);
    const std::uint64_t high = warp::shuffle(header.word[1], holder);
    const std::uint64_t both = in_line % 16 < 8 ? low : high;
    return static_cast<std::uint32_t>(at % 8 == 0 ? both : both >> 32);
  }

  /// The scales of a block of recv_x lie column by column; those of UE8M0 are the bytes of words.
  DEEP_EP_DEVICE void store_scale(std::uint32_t position, std::uint32_t scale, std::uint32_t bits) const {
    if (scale >= row.num_scales()) return;
    const bool packed = params.format == LowLatencyFormat::fp8_ue8m0;
    const auto block_rows = static_cast<std::uint32_t>(params.rank_major ? params.max_tokens : capacity());
    const std::uint32_t columns = packed ? row.num_scales() / 4 : row.num_scales();
    const std::uint32_t block = position / block_rows;
    const std::int64_t column = std::int64_t{block} * columns + (packed ? scale / 4 : scale);
    const std::int64_t word = column * block_rows + (position - block * block_rows);
    if (packed) {
      params.recv_scales[word * 4 + scale % 4] = static_cast<std::byte>(bits >> 23);  // the exponent of a power of two
    } else {
      reinterpret_cast<std::uint32_t*>(params.recv_scales)[word] = bits;
    }
  }

  /// Eight bytes of the row, which begin at `at`, to one of its places.
  DEEP_EP_DEVICE void store_word(std::uint32_t position, std::uint32_t at, std::uint64_t word) const {
    if (at < row.payload_bytes()) {
      store_stream(reinterpret_cast<std::uint64_t*>(params.recv_x + std::int64_t{position} * row.payload_bytes() + at),
                   word);
    } else if (at < row.header_at()) {
      const std::uint32_t scale = (at - row.scales_at()) / 4;
      store_scale(position, scale, static_cast<std::uint32_t>(word));
      store_scale(position, scale + 1, static_cast<std::uint32_t>(word >> 32));
    }
  }

  DEEP_EP_DEVICE void store_lines(const Lines& lines, std::uint32_t position) const {
    const LineLane lane;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (!lines.is_line(i)) continue;
      const std::uint32_t at = lane.payload_at(lines.line(i));
      store_word(position, at, lines.held[i].word[0]);
      if (!lane.has_tag()) store_word(position, at + 8, lines.held[i].word[1]);
    }
  }

  /// One warp's part of a row.
  DEEP_EP_DEVICE void receive_row(int source, int slot, int part) const {
    const LowLatencyParams& common = params.common;

    // 1. The lines.
    const auto of_lane = static_cast<std::uint32_t>(LineLane().line);
    Lines lines{common.local + common.window.row_at(kDispatch, epoch(), source, slot, row.bytes()),
                epoch(),
                row.lines(),
                static_cast<std::uint32_t>(part * kWarpLines) + of_lane,
                static_cast<std::uint32_t>(params.warps_per_row * kWarpLines),
                row.header_at() / kTaggedPayload + of_lane,
                {},
                {}};
    if (!await(source, lines)) return;

    // 2. Where the row goes.
    const int lane = lane_index();
    const std::uint32_t selection = header_word(lines.header, row.selection_word(lane < params.num_topk ? lane : 0));
    const std::int32_t position = lane < params.num_topk ? place(source, slot, selection) : -1;
    std::uint32_t places = warp::ballot(position >= 0);
    if (params.rank_major) places &= ~places + 1;  // once, whatever the number of experts

    // 3. The row and its scales to each place; and on to the next lines, if it has more.
    for (;;) {
      for (std::uint32_t left = places; left != 0; left &= left - 1) {
        store_lines(lines, static_cast<std::uint32_t>(warp::shuffle(position, lowest_bit(left))));
      }
      lines.next_batch();
      if (warp::all(!lines.is_line(0))) break;
      if (!await(source, lines)) return;
    }
    if (part == 0) note_row(lines.header, source, slot, selection, position);
  }

  /// The row of recv_x that belongs to the lane's selection; -1: on another rank, or there is no room.
  DEEP_EP_DEVICE std::int32_t place(int source, int slot, std::uint32_t selection) const {
    const int local = static_cast<int>(selection & 0xffffu) - params.common.rank * params.num_local_experts;
    if ((selection & 0xffffu) == LowLatencyRow::kNoExpert || local < 0 || local >= params.num_local_experts) return -1;
    if (params.rank_major) return source * params.max_tokens + slot;
    const std::uint32_t index = entries(source, local) + (selection >> 16);
    return index < static_cast<std::uint32_t>(capacity()) ? local * capacity() + static_cast<std::int32_t>(index) : -1;
  }

  /// What the caller and combine get to know of the row.
  DEEP_EP_DEVICE void note_row(const LinePart& header, int source, int slot, std::uint32_t selection,
                               std::int32_t position) const {
    const int lane = lane_index();
    const bool selects = lane < params.num_topk;
    const auto token = static_cast<std::int32_t>(header_word(header, LowLatencyRow::kToken));
    const std::uint32_t weight = row.weights ? header_word(header, row.weight_word(selects ? lane : 0)) : 0;
    const std::int64_t row_index = std::int64_t{source} * params.max_tokens + slot;
    if (lane == 0) {
      *table().token(source, slot) = token;
      if (params.rank_major) params.src_info[row_index] = token;
    }
    if (!selects) return;
    *table().position(source, slot, lane) = position;
    if (!params.rank_major) {
      if (position >= 0) params.src_info[position] = token;
      return;
    }
    const std::int64_t at = row_index * params.num_topk + lane;
    const int local = static_cast<int>(selection & 0xffffu) - params.common.rank * params.num_local_experts;
    params.recv_topk_idx[at] = position >= 0 ? local : -1;
    if (row.weights) params.recv_topk_weights[at] = position >= 0 ? float_from_bits(weight) : 0.0f;
  }
};

}  // namespace deep_ep::device
