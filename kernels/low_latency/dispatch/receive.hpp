// The receive part of the low-latency dispatch: rows arrive in the window at [source][slot], and are copied from there
// to their experts. A few warps share the lines of a row. Each polls its own into its registers.
#pragma once

#include "deep_ep/arrivals.hpp"
#include "kernels/low_latency/dispatch/send.hpp"
#include "kernels/primitives/line.hpp"

namespace deep_ep::device::low_latency {

template <bool kRdma>
struct DispatchReceiver {
  const LowLatencyDispatchParams& params;
  const DispatchShared& shared;
  LowLatencyRow row;
  bool writes;  ///< this block: counts and ranges, for the caller and combine, and how long it has waited
  std::uint64_t epoch;

  static constexpr int kBatch = 4;  ///< line parts that a lane holds: four warps hold an FP8 row of 7168 channels

  DEEP_EP_DEVICE DispatchCall<kRdma> call() const { return {params.common, epoch, row.bytes()}; }
  DEEP_EP_DEVICE std::uint32_t& entries(int source, int local) const {
    return shared.entries[source * params.num_local_experts + local];
  }

  // ---- Counts ----

  /// Waits for one cell of `source`'s counts and puts it into shared memory, zeros if it does not come. False: the call
  /// is over.
  DEEP_EP_DEVICE bool learn(int source, int cell) const {
    const LowLatencyParams& common = params.common;
    const Cell* const counts = common.window.counts.at(epoch, source, cell).in(common.local);
    std::uint64_t payload = 0;
    const bool costs = writes && cell == 0 && params.wait_cost != nullptr;
    const std::int64_t begin = clock_cycles();
    std::int64_t missed = begin;  // the last look that did not find it: lanes may all go on with the last one
    const auto arrived = [&](const Poll&) {
      if (call().has_begun(source)) {
        const Cell now = load_cell(counts);
        payload = now.payload;
        if (now.epoch >= epoch) return true;
      }
      missed = clock_cycles();
      return false;
    };
    const bool came =
        !masked(common, source) && wait_until(call(), {source, Wanted::low_latency_dispatch_counts, epoch}, arrived);
    const bool on = came || !aborted(common.wait);
    if (!came) payload = 0;  // of a call before
    if (costs && came) params.wait_cost[source] += missed - begin;
    if (cell > 0) {
      const int local = 2 * (cell - 1);
      entries(source, local) = static_cast<std::uint32_t>(payload);
      if (local + 1 < params.num_local_experts) entries(source, local + 1) = static_cast<std::uint32_t>(payload >> 32);
      return on;
    }
    const auto head = __builtin_bit_cast(CountHead, payload);
    shared.rows[source] = head.rows;
    if (writes) *params.table().rows(source) = head.rows;
    if (kRdma) shared.relayed[source] = head.relayed;
    if (!came || head.call_shape == params.call_shape) return on;
    report_fault(common.wait, FaultKind::mismatch, Wanted::low_latency_dispatch_counts, source, 0, params.call_shape,
                 head.call_shape);
    return false;
  }

  /// For one of our experts: turns the number of rows of each source into where they begin.
  DEEP_EP_DEVICE void add_up(int local) const {
    const int num_ranks = params.common.num_ranks;
    const auto most = static_cast<std::uint32_t>(params.expert_rows);
    std::uint32_t end = 0;
    bool overflow = false;
#pragma unroll 1
    for (int source = 0; source < num_ranks; ++source) {
      const std::uint32_t begin = end;
      const std::uint32_t sent = entries(source, local);
      const std::uint32_t taken = sent < most - begin ? sent : most - begin;
      overflow = overflow || taken < sent;
      end = begin + taken;
      entries(source, local) = begin;
      if (writes) {
        params.layout_range[std::int64_t{local} * num_ranks + source] =
            static_cast<std::int64_t>(static_cast<std::uint64_t>(begin) << 32 | taken);
      }
    }
    if (!writes) return;
    params.recv_count[local] = static_cast<std::int32_t>(end);
    if (overflow) {
      report_fault(params.common.wait, FaultKind::overflow, Wanted::low_latency_dispatch_rows, params.common.rank,
                   local, most + 1, most);
    }
  }

  /// By whole blocks: learns how many rows come. False: the call is over.
  DEEP_EP_DEVICE bool learn_counts() const {
    const Divisor& cells = params.count_cells;
    bool learned = true;
    block::each(cells * params.common.num_ranks, [&](int i) { learned = learn(i / cells, i % cells) && learned; });
    learned = block::all(learned);
    block::each(params.num_local_experts, [&](int local) { add_up(local); });
    if (writes && thread_index() == 0) *params.table().epoch() = static_cast<std::int32_t>(epoch);
    block::sync();
    if (writes) tell_counts();
    return learned;
  }

  // ---- Arrival counters: deep_ep/arrivals.hpp has the protocol. Every warp that has a part in a row adds to the word
  // of each of the row's places, and the block that knows how many rows there are adds what the word still lacks to
  // kArrivalStep. Additions commute: the last of them completes the word, whichever that is. ----

  /// By a whole warp: its part of a row is stored at `places`, lane i's at row `row` of local expert `local`.
  DEEP_EP_DEVICE void tell_stored(std::uint32_t places, int local, int row) const {
    if (params.arrivals == nullptr) return;
    warp::sync();  // behind it, what one lane releases are the stores of all
    if ((places >> lane_index() & 1) == 0) return;
    const std::int64_t word = std::int64_t{local} * params.arrival_words + (row >> params.arrival_shift);
    add_release<Scope::gpu>(params.arrivals + word, 1);
  }

  /// By one block, when it has written all counts and synced.
  DEEP_EP_DEVICE void tell_counts() const {
    if (params.arrivals == nullptr) return;
    const int words = params.arrival_words;
    block::each(params.num_local_experts * words, [&](int i) {
      const std::int64_t first = std::int64_t{i % words} << params.arrival_shift;
      const std::int64_t most = std::int64_t{1} << params.arrival_shift;
      const std::int64_t left = params.recv_count[i / words] - first;
      const std::int64_t rows = left < 0 ? 0 : left < most ? left : most;
      add_release<Scope::gpu>(params.arrivals + i, kArrivalStep - rows * params.warps_per_row);
    });
  }

  /// By every warp at its end: if the call has failed, nobody may wait for the rows that will not come.
  DEEP_EP_DEVICE void tell_failure() const {
    if (params.arrivals == nullptr || !aborted(params.common.wait)) return;
    warp::each(params.num_local_experts * params.arrival_words,
               [&](int i) { store_relaxed<Scope::gpu>(params.arrivals + i, kArrivalFailed); });
  }

  // ---- Rows ----

  /// All rows, where this warp is `part` of the `group`-th of `groups` groups. By rails first those of its own node;
  /// then it hands on what other nodes have sent to this rank for all of its node; then those that others hand on to
  /// it. The sources take turns, as their rows arrive at the same time; in a different order for each slot, so that
  /// those of one turn by rails fall to all groups.
  DEEP_EP_DEVICE void receive_rows(int group, int groups, int part) const {
    const Divisor& ranks = params.common.num_ranks;
#pragma unroll 1
    for (int turn = 0; turn < (call().uses_rails() ? 3 : 1); ++turn) {
      const bool relays = kRdma && turn == 1;
      const auto rows = [&](int source) {
        if (relays) return static_cast<int>(shared.relayed[source]);
        const bool taken = !call().uses_rails() || call().in_own_node(source) == (turn == 0);
        return taken ? static_cast<int>(shared.rows[source]) : 0;
      };
      int most = 0;  // rows of any source
#pragma unroll 1
      for (int source = 0; source < ranks; ++source) most = rows(source) > most ? rows(source) : most;
      const int all = most * ranks;
#pragma unroll 1
      for (int i = group; i < all; i += groups) {
        const int slot = i / ranks, source = (i + slot) % ranks;
        if (slot < rows(source)) receive_row(source, slot, part, relays, i + groups >= all);
      }
    }
  }

  /// Lines of a row in one warp's registers: its share of them; last the first lines, with the header.
  struct Lines : LinePoller<kBatch + 1> {
    static constexpr int kHead = kBatch;
    const std::byte* row;       ///< in the window; in staging memory for one that is relayed
    std::uint32_t lines;        ///< of the row
    std::uint32_t first, step;  ///< this lane's of the payload: first, first + step ..., kBatch of them

    DEEP_EP_DEVICE std::uint32_t line(int i) const {
      return i == kHead ? static_cast<std::uint32_t>(LineLane().line) : first + static_cast<std::uint32_t>(i) * step;
    }
    DEEP_EP_DEVICE bool is_line(int i) const { return line(i) < lines; }
    DEEP_EP_DEVICE const Cell& head() const { return this->part[kHead]; }
  };

  /// The rank to wait for if a row of `source` is missing: by rails the relay of this node that hands it on. A relay
  /// itself tells for which rank it has waited.
  DEEP_EP_DEVICE Awaited row_of(int source) const {
    const bool relayed = call().uses_rails() && call().is_far(source) && !call().is_relay(source);
    return {relayed ? call().rail(call().own_node(), source) : source, Wanted::low_latency_dispatch_rows, epoch};
  }
  /// Stores the row's scales at `places`, a word in each lane. False: the call is over, and some have not come.
  DEEP_EP_DEVICE bool store_scales(int source, const Lines& lines, std::uint32_t selection, std::int32_t position,
                                   std::uint32_t places) const {
    constexpr int kWords = kWarpLines * static_cast<int>(kTaggedPayload / 4);  // that a warp has at once
    if (places == 0) return true;
    const LowLatencyScales scales = params.scale_layout();
    const int first = row.header_words(), end = first + static_cast<int>(row.scale_words());
    Cell part = lines.head();
#pragma unroll 1
    for (int begin = 0;; begin += kWords) {
      const int stop = end < begin + kWords ? end : begin + kWords;
#pragma unroll 1
      for (int word = begin == 0 ? first : begin; word < stop; word += kWarpSize) {
        const int at = word + lane_index(), scale = at - first;
        const std::uint32_t bits = header_word(part, at - begin);
        each_bit(places, [&](int k) {
          const int to = warp::shuffle(position, k), local = local_expert(warp::shuffle(selection, k));
          auto* const words =
              reinterpret_cast<std::uint32_t*>(params.recv_scales) + scales.first(local, to - local * scales.rows);
          if (at >= stop) return;
          if (scales.packed()) {  // the exponent of a power of two
            auto* const exponents = reinterpret_cast<std::byte*>(words + std::int64_t{scale / 4} * scales.stride());
            exponents[scale % 4] = static_cast<std::byte>(bits >> 23);
          } else {
            words[std::int64_t{scale} * scales.stride()] = bits;
          }
        });
      }
      if (stop == end) return true;  // nearly always: all scales are in the first lines
      const auto line = static_cast<std::uint32_t>((begin / kWords + 1) * kWarpLines + LineLane().line);
      const auto arrived = [&](const Poll&) {
        part = load_line(lines.row + LineLane().byte_at(line), line < lines.lines);
        return all_tagged(part, epoch, line < lines.lines);
      };
      if (!wait_until<WholeWarp>(call(), row_of(source), arrived)) return false;
    }
  }

  /// Receives one warp's part of a row; or hands it on (`relays`) to each rank of this node that has an expert of it,
  /// this one included. A row that is handed on carries its tags already, and says which slot of each rank is its own.
  DEEP_EP_DEVICE void receive_row(int source, int slot, int part, bool relays, bool last) const {
    // 1. The lines.
    // By NVLink tags may always be trusted, and so by rails: the relay has waited.
    if (call().is_far(source) && (relays || !call().uses_rails()) &&
        !call().template await_progress<WholeWarp>(source, slot + 1, Wanted::low_latency_dispatch_rows)) {
      return;
    }
    const auto line = static_cast<std::uint32_t>(part * kWarpLines + LineLane().line);
    const Place<std::byte> from = relays ? call().relayed_row(call().node(source), slot) : call().row(source, slot);
    Lines lines{{},
                from.in(params.common.local),
                row.lines(),
                relays ? line : row.head_lines() + line,
                static_cast<std::uint32_t>(params.warps_per_row * kWarpLines)};
    const auto all_there = [&](const Poll& look) {
      return lines.poll(
          look.thorough, [&](int) { return epoch; },
          [&](int i) { return lines.row + LineLane().byte_at(lines.line(i)); },
          [&](int i) { return lines.is_line(i); });
    };
    const int lane = lane_index();
    std::uint32_t selection = 0, places = 0;
    std::int32_t position = -1;
    std::byte* to = nullptr;
#pragma unroll 1
    for (bool first_batch = true;; first_batch = false) {
      if (!wait_until<WholeWarp>(call(), row_of(source), all_there)) return;
      // Few rows: all warps of the block share this one, and some lines of it have come, so the others come, too.
      const bool alone = last && params.warps_per_row == block_warps();
      if (!kRdma && alone && params.common.lets_next_start) block::let_next_kernel_start();

      // 2. Where the row goes.
      if (first_batch && relays) {
        to = relayed_to(source, lines.head());
      } else if (first_batch) {
        selection = header_word(lines.head(), row.selection_word(lane < params.num_topk ? lane : 0));
        if (lane < params.num_topk) position = place(source, selection);
        places = warp::ballot(position >= 0);
      }

      // 3. Store it at each place. Then the next lines, if there are more.
      if (relays) {
        each_bit(warp::ballot(to != nullptr), [&](int k) {
          std::byte* const begin = warp::shuffle(to, k);
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            store_line(begin + LineLane().byte_at(lines.line(i)), lines.part[i], lines.is_line(i));
          }
        });
      } else {
        const std::uint32_t first = lines.first - row.head_lines();
        const int first_vector = LineLane().vector(first), step = LineLane::vectors(lines.step);
        each_bit(places, [&](int k) {
          const std::int64_t at = warp::shuffle(position, k);
          auto* const begin = reinterpret_cast<Vec16*>(params.recv_x) + at * row.vectors();
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const int vector = first_vector + i * step;
            if (vector < row.vectors()) store_vector(begin + vector, first, lines.part[i]);
          }
        });
      }
      lines.first += lines.step * kBatch;
      lines.missing = (1u << Lines::kHead) - 1;
      if (warp::all(!lines.is_line(0))) break;
    }
    if (relays) return;

    // 4. The rest: every warp stores the scales at its share of the places, the last one also stores the words.
    const int before = count_bits(places & ((1u << lane) - 1));
    const std::uint32_t share = row.scaled() ? places & warp::ballot(before % params.warps_per_row == part) : 0;
    const bool scaled = store_scales(source, lines, selection, position, share);
    if (part == params.warps_per_row - 1) note_row(lines.head(), source, slot, position);
    if (!scaled) return;  // the call is over
    const int local = local_expert(selection);
    tell_stored(places, local, position - local * params.expert_rows);
  }

  /// In one lane for each rank that gets the row: its place in that rank's window; else nullptr. There is room: the
  /// block has the rank's counts of this call, and a rank sends none before it has received the call before the last.
  DEEP_EP_DEVICE std::byte* relayed_to(int source, const Cell& head) const {
    const int lane = lane_index();
    const int rank = params.rank_of(static_cast<int>(header_word(head, row.selection_word(lane)) & 0xffffu));
    const std::uint32_t slot = header_word(head, row.second_word(lane));
    const bool wants = lane < params.num_topk && call().in_own_node(rank);
    const std::uint32_t same = warp::match_any(wants ? static_cast<std::uint32_t>(rank) : ~0u);
    return wants && lowest_bit(same) == lane ? call().row(source, static_cast<int>(slot)).in(shared.heaps[rank])
                                             : nullptr;
  }

  DEEP_EP_DEVICE int local_expert(std::uint32_t selection) const {
    return static_cast<int>(selection & 0xffffu) - params.common.rank * params.num_local_experts;
  }

  /// The row of recv_x that belongs to the lane's selection; -1: on another rank, or there is none (see add_up).
  DEEP_EP_DEVICE std::int32_t place(int source, std::uint32_t selection) const {
    const int local = local_expert(selection);
    if (local < 0 || local >= params.num_local_experts) return -1;
    const std::uint32_t index = entries(source, local) + (selection >> 16);
    if (index >= static_cast<std::uint32_t>(params.expert_rows)) return -1;
    return local * params.expert_rows + static_cast<std::int32_t>(index);
  }

  /// What the caller and combine need to know of the row.
  DEEP_EP_DEVICE void note_row(const Cell& head, int source, int slot, std::int32_t position) const {
    const int lane = lane_index();
    const auto token = static_cast<std::int32_t>(header_word(head, LowLatencyRow::kToken));
    const float weight = row.weighted ? float_from_bits(header_word(head, row.second_word(lane))) : 0.0f;
    if (lane == 0) *params.table().token(source, slot) = token;
    if (lane >= params.num_topk) return;
    *params.table().position(source, slot, lane) = position;
    if (row.weighted) *params.table().weight(source, slot, lane) = weight;
    if (position >= 0) params.src_info[position] = token;
  }
};

}  // namespace deep_ep::device::low_latency
