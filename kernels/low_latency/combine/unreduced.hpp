// Low-latency combine of calls in two launches: every row that the dispatch brought goes to the token's owner as the
// expert left it, and the owner multiplies and adds. So the send part waits for no rank's selections, and a late rank
// holds up no other.
//
//   send part     counters, row table, acknowledgements (one load time) -> rows of x, behind their signals if there
//                 are any (one load time) -> lines to the owners; all blocks are done -> cell to all ranks
//   receive part  counters, selections (one load time) -> lines, as they are polled -> result; all blocks have read,
//                 all ranks have sent (one block waits for that alone) -> acknowledgements
//
// Places: rows of a token lie at [token][selection] in the owner's part of the window for combine, those of all ranks
// together. A row's tags name its expert: an owner that selects another one does not take it.
//
// A rank says in the first cell of its selections that it has sent all its rows. Ranks whose combine is in one launch
// announce a selection there: so both find out that they mean different calls.
//
// Room: a sender writes to an owner that has acknowledged the call before the last. A rank acknowledges at the end of
// its receive part, when all ranks have sent all their rows: so no row of an acknowledged call is under way, not even
// one that the rank did not want.
//
// For ranks that all reach each other by NVLink, without masking, where the rows fit the window. Other calls with hooks
// send as calls in one launch do. (A masked rank that comes late would write into places of others; what posters and
// relays post are sums.)
#pragma once

#include "kernels/low_latency/combine/shared.hpp"

namespace deep_ep::device::low_latency {

/// The expert side. If there are more groups than rows, so many share the selections of a row: a group that copies one
/// after the other waits for memory each time.
///
/// The program may still compute the rows (single-batch overlap): its GEMM runs beside the send part, on other SMs, and
/// raises signals. Then a row is read once its signal is there, and none that is there waits for another: each group is
/// a warp, which goes round among its rows until it has pushed all.
struct UnreducedPusher : RowPusher {
  static constexpr int kTogether = 4;  ///< lines of a thread whose loads are under way at once

  /// By whole warps: all rows.
  DEEP_EP_DEVICE void push_all(const CombineCall<false>& call) const {
    int missing = kNoSignal;
    const auto all_pushed = [&](const Poll&) {
      missing = push_rows(call);
      return missing == kNoSignal;
    };
    poll_until<16>(all_pushed, [&](const Poll& poll) {
      if (lane_index() == 0) end_if_late(missing, poll.begin);
      return warp::any(aborted(params.common.wait));
    });
  }

 private:
  static constexpr int kNoSignal = -1;

  /// Pushes the group's rows: with signals those that are there and have not left. Returns a signal that another waits
  /// for.
  DEEP_EP_DEVICE int push_rows(const CombineCall<false>& call) const {
    const LowLatencySignals& signals = params.signals;
    int missing = kNoSignal;
    std::uint32_t* done = shared.pushed + group * params.held_up(step());
    warp::sync();  // what lane 0 has noted in the round before
    each([&](const CombineRow& row, int member) {
      const bool here = row.position >= 0;
      const int before = count_bits(warp::ballot(here) & ((1u << lane_index()) - 1));
      std::uint32_t rows = warp::ballot(here && (before & ((1 << sharing) - 1)) == member);
      if (signals.words != nullptr) {
        rows &= ~*done;
        const bool wanted = (rows >> lane_index() & 1) != 0;
        const int word = wanted ? row.position / params.expert_rows * signals.words_of_expert +
                                      row.position % params.expert_rows / signals.rows_of_word
                                : kNoSignal;
        const bool ready = wanted && load_acquire<Scope::gpu>(signals.words + word) >= signals.expected;
        const std::uint32_t now = warp::ballot(ready);
        if (now != rows) missing = warp::shuffle(word, lowest_bit(rows & ~now));
        warp::sync();  // all have read the bits, and the rows are acquired for every lane
        if (lane_index() == 0) *done |= now;
        ++done;
        rows = now;
      }
      std::byte* heap = params.common.heaps[row.source];
      const int first_expert = params.common.rank * params.num_local_experts;
      each_bit(rows, [&](int k) {
        const int position = warp::shuffle(row.position, k);
        const int expert = first_expert + position / params.expert_rows;  // named by the row's tags
        copy(position, call.selected_row(row.token, k).in(heap),
             call.tag(call.mark(CombineRowKind::selected_row, expert)));
      });
      return true;
    });
    return missing;
  }

  /// This warp's share of the lines of row `position` of x, of which other rows may still be written.
  DEEP_EP_DEVICE void copy(std::int32_t position, std::byte* to, std::uint64_t tag) const {
    const auto* from = reinterpret_cast<const Vec16*>(params.x) + std::int64_t{position} * format().vectors;
    std::uint32_t line = first_line(1);
#pragma unroll 1
    for (int left = line_steps(1); left > 0; left -= kTogether) {
      Vec16 loaded[kTogether] = {};
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int vector = i < left ? format().vector(line + i * line_step(1)) : -1;
        if (vector >= 0) loaded[i] = load_weak(from + vector);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i, line += line_step(1)) {
        if (i < left) format().store(to, line, loaded[i], tag);
      }
    }
  }

  /// By one thread: ends the call if the signal has not come for too long.
  DEEP_EP_DEVICE void end_if_late(int word, std::uint64_t begin) const {
    const std::uint32_t seen = load_acquire<Scope::gpu>(params.signals.words + word);
    const std::uint32_t expected = params.signals.expected;
    const WaitContext& wait = params.common.wait;
    const int rank = params.common.rank;
    constexpr Wanted kWanted = Wanted::low_latency_combine_signal;
    if (seen >= expected || !may_be_late(begin)) return;
    if (is_late_wait(wait, rank, kWanted, begin, [] {}) != Lateness::late) return;
    const auto expert = static_cast<std::uint64_t>(word / params.signals.words_of_expert);
    report_fault(wait, FaultKind::timeout, kWanted, rank, word, expert << 32 | expected, seen);
  }
};

}  // namespace deep_ep::device::low_latency
