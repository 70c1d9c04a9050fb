// The receive part of the low-latency dispatch: rows come into [source][slot] of the window, and go from there to the
// experts that they are for. A few warps share a row: all of it is in their registers at once.
#pragma once

#include "kernels/low_latency/dispatch_send.hpp"

namespace deep_ep::device {

/// The threads of a block that receive: all of its warps from `first_warp` on.
struct ReceivingWarps {
  int first_warp;
  int warps;

  DEEP_EP_DEVICE int thread() const { return thread_index() - first_warp * kWarpSize; }
  DEEP_EP_DEVICE int threads() const { return warps * kWarpSize; }
  DEEP_EP_DEVICE void sync() const { block::sync(1, threads()); }
};

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

  static constexpr int kBatch = 4;  ///< vectors of a row that a lane holds: an FP8 row of 7168 channels in four warps

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
  DEEP_EP_DEVICE void learn_counts(const ReceivingWarps& team, const ReceiverRole& role) const {
    const int num_ranks = params.common.num_ranks;
    const int cells = 1 + (params.num_local_experts + 1) / 2;
    for (int i = team.thread(); i < cells * num_ranks; i += team.threads()) learn(i / cells, i % cells, role);
    team.sync();
    if (team.thread() == 0) layout.words(memory).failed = aborted(params.common.wait) ? 1 : 0;
    for (int local = team.thread(); local < params.num_local_experts; local += team.threads()) add_up(local, role);
    for (int source = team.thread(); source < num_ranks; source += team.threads()) settle(source, role);
    team.sync();
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

  /// The row's token at its source, when the row is there; -1: it will not come.
  DEEP_EP_DEVICE int await_row(int source, int slot) const {
    const LowLatencyParams& common = params.common;
    int token = 0;
    if (lane_index() == 0) {
      const auto* flag = reinterpret_cast<const std::uint64_t*>(
          common.local + common.window.flag_at(kDispatch, epoch(), source, slot));
      const bool there = wait_for_peer(common, source, Wanted::low_latency_dispatch_rows, epoch(), [&](auto& seen) {
        const std::uint64_t now = load_acquire<Scope::system>(flag);
        seen = now >> 16;
        token = static_cast<int>(now & 0xffffu);
        return seen >= epoch();
      });
      if (!there) token = -1;
    }
    token = warp::shuffle(token, 0);
    warp::sync();  // what lane 0 acquired, all may read only after this
    return token;
  }

  /// A share of a row's vectors: those that one lane of its warps copies.
  struct Share {
    int first, step, end;
    Vec16 held[kBatch];

    DEEP_EP_DEVICE void load(const Vec16* from) {
      for (int i = 0; i < kBatch; ++i) {
        if (first + i * step < end) held[i] = load_weak(from + first + i * step);
      }
    }
    DEEP_EP_DEVICE void store(std::byte* to) const {
      for (int i = 0; i < kBatch; ++i) {
        if (first + i * step < end) store_stream(reinterpret_cast<Vec16*>(to) + first + i * step, held[i]);
      }
    }
  };

  DEEP_EP_DEVICE int output_scales() const {
    if (!row.fp8) return 0;
    return params.hidden / (params.format == LowLatencyFormat::fp8_ue8m0 ? 4 * kScaleChannels : kScaleChannels);
  }
  /// Output word `i` of the row's scales.
  DEEP_EP_DEVICE std::uint32_t load_scale(const std::byte* from, int i) const {
    if (params.format != LowLatencyFormat::fp8_ue8m0) {
      return load_weak(reinterpret_cast<const std::uint32_t*>(from + row.scales_at()) + i);
    }
    const Vec16 four = load_weak(reinterpret_cast<const Vec16*>(from + row.scales_at()) + i);
    std::uint32_t packed = 0;
    for (int j = 0; j < 4; ++j) packed |= (four.word[j] >> 23 & 0xffu) << (8 * j);  // exponents of powers of two
    return packed;
  }
  /// The scales of a block of recv_x lie column by column.
  DEEP_EP_DEVICE void store_scale(std::uint32_t position, int i, std::uint32_t word) const {
    const auto block_rows = static_cast<std::uint32_t>(params.rank_major ? params.max_tokens : capacity());
    const std::uint32_t block = position / block_rows;
    const std::int64_t column = std::int64_t{block} * output_scales() + i;
    reinterpret_cast<std::uint32_t*>(params.recv_scales)[column * block_rows + (position - block * block_rows)] = word;
  }

  /// One warp's part of a row.
  DEEP_EP_DEVICE void receive_row(int source, int slot, int part) const {
    const LowLatencyParams& common = params.common;
    const int token = await_row(source, slot);
    if (token < 0) return;

    // 1. All loads at once.
    const std::byte* from = common.local + common.window.row_at(kDispatch, epoch(), source, slot, row.bytes());
    const int lane = lane_index();
    const int step = params.warps_per_row * kWarpSize;
    const int vectors = static_cast<int>(row.payload_bytes() / sizeof(Vec16));
    const int scale = part * kWarpSize + lane;
    Share share{scale, step, vectors, {}};
    std::uint32_t selection = LowLatencyRow::kNoExpert;
    std::uint32_t scale_word = 0;
    if (lane < params.num_topk) {
      selection = load_weak(reinterpret_cast<const std::uint32_t*>(from + row.selections_at()) + lane);
    }
    share.load(reinterpret_cast<const Vec16*>(from));
    if (scale < output_scales()) scale_word = load_scale(from, scale);

    // 2. Where the row goes.
    const std::int32_t position = place(source, slot, selection);
    std::uint32_t places = warp::ballot(position >= 0);
    if (params.rank_major) places &= ~places + 1;  // once, whatever the number of experts

    // 3. The row, and what goes with it.
    for (int base = part * kWarpSize;;) {
      for (std::uint32_t left = places; left != 0; left &= left - 1) {
        const std::int32_t to = warp::shuffle(position, lowest_bit(left));
        share.store(params.recv_x + std::int64_t{to} * row.payload_bytes());
      }
      base += step * kBatch;
      if (base >= vectors) break;
      share.first += step * kBatch;
      share.load(reinterpret_cast<const Vec16*>(from));
    }
    for (int base = part * kWarpSize; base < output_scales(); base += step) {
      const int i = base + lane;
      if (i >= step && i < output_scales()) scale_word = load_scale(from, i);
      for (std::uint32_t left = places; left != 0; left &= left - 1) {
        const std::int32_t to = warp::shuffle(position, lowest_bit(left));
        if (i < output_scales()) store_scale(static_cast<std::uint32_t>(to), i, scale_word);
      }
    }
    if (part == 0) note_row(from, source, slot, token, selection, position);
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
  DEEP_EP_DEVICE void note_row(const std::byte* from, int source, int slot, int token, std::uint32_t selection,
                               std::int32_t position) const {
    const int lane = lane_index();
    const std::int64_t row_index = std::int64_t{source} * params.max_tokens + slot;
    if (lane == 0) {
      *table().token(source, slot) = token;
      if (params.rank_major) params.src_info[row_index] = token;
    }
    if (lane >= params.num_topk) return;
    *table().position(source, slot, lane) = position;
    if (!params.rank_major) {
      if (position >= 0) params.src_info[position] = token;
      return;
    }
    const std::int64_t at = row_index * params.num_topk + lane;
    const int local = static_cast<int>(selection & 0xffffu) - params.common.rank * params.num_local_experts;
    params.recv_topk_idx[at] = position >= 0 ? local : -1;
    if (row.weights) {
      const float weight = load_weak(reinterpret_cast<const float*>(from + row.weights_at()) + lane);
      params.recv_topk_weights[at] = position >= 0 ? weight : 0.0f;
    }
  }
};

}  // namespace deep_ep::device
