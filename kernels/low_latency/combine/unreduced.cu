// Low-latency combine of calls in two launches: every row that the dispatch brought goes to the token's owner as the
// expert left it, and the owner multiplies and adds. So the send part waits for no rank's selections, and a late rank
// holds up no other. A kernel of its own, as the one for calls in one launch has no room for its instructions.
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
// one that the rank did not want. It does not wait for its next call to do so, as calls in one launch do: with two
// calls in flight that next call is the very one whose rows would wait for it.
//
// For ranks that all reach each other by NVLink, without masking, where the rows fit the window. Other calls with hooks
// send as calls in one launch do. (A masked rank that comes late would write into places of others; what posters and
// relays post are sums.)
#include "kernels/kernel_list.hpp"
#include "kernels/low_latency/combine/add.hpp"
#include "kernels/low_latency/combine/shared.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device::low_latency {

/// The expert side. Groups of warps take rows in turn, and the warps of a group share a row by its lines. If there are
/// more groups than rows, so many share the selections of a row: a group that copies one after the other waits for
/// memory each time.
///
/// The program may still compute the rows (single-batch overlap): its GEMM runs beside the send part, on other SMs, and
/// raises signals. Then a row is read once its signal is there, and none that is there waits for another: each group is
/// a warp, which goes round among its rows until it has pushed all.
struct UnreducedPusher {
  static constexpr int kTogether = 4;  ///< lines of a thread whose loads are under way at once

  const LowLatencyCombineParams& params;
  const CombineWire& wire;
  ReceivedRows received;
  int warp;                        ///< in the group
  std::uint32_t* pushed;           ///< with signals: for each row of the group a bit for each selection that has left
  std::uint64_t acknowledged = 0;  ///< see load_room()

  /// Starts the loads that do not depend on the call.
  DEEP_EP_DEVICE void load_first(bool reads_counters) {
    int& sharing = received.sharing;
    while (params.expert_rows() << (sharing + 1) <= received.step() && 1 << sharing < params.num_topk) ++sharing;
    received.load_first();
    acknowledged = load_room(UnreducedCall(params.common, 0, params.row_bytes), reads_counters);
  }

  /// By whole warps: all rows, once their owners have room.
  DEEP_EP_DEVICE void push_all(const UnreducedCall& call) const {
    if (!await_room(call, 0, params.common.num_ranks, acknowledged)) return;
    if (params.signals.words == nullptr) {
      push_rows<false>(call);
      return;
    }
    int missing = kNoSignal;
    const auto all_pushed = [&](const Poll&) {
      missing = push_rows<true>(call);
      return missing == kNoSignal;
    };
    poll_until<16>(all_pushed, [&](const Poll& poll) {
      if (lane_index() == 0) end_if_late(missing, poll.begin);
      return warp::any(aborted(params.common.wait));
    });
  }

 private:
  static constexpr int kNoSignal = -1;

  /// Pushes the group's rows; kSignalled: those that are there and have not left. Returns a signal that another waits
  /// for.
  template <bool kSignalled>
  DEEP_EP_DEVICE int push_rows(const UnreducedCall& call) const {
    int missing = kNoSignal;
    std::uint32_t* done = pushed;
    if constexpr (kSignalled) warp::sync();  // what lane 0 has noted in the round before
    received.each([&](const CombineRow& row, int member) {
      const bool here = row.position >= 0;
      const int before = count_bits(warp::ballot(here) & ((1u << lane_index()) - 1));
      std::uint32_t rows = warp::ballot(here && (before & ((1 << received.sharing) - 1)) == member);
      if constexpr (kSignalled) {
        rows &= ~*done;
        const bool wanted = (rows >> lane_index() & 1) != 0;
        const int word = wanted ? signal_of(row.position) : kNoSignal;
        const bool ready = wanted && load_acquire<Scope::gpu>(params.signals.words + word) >= params.signals.expected;
        const std::uint32_t now = warp::ballot(ready);
        if (now != rows) missing = warp::shuffle(word, lowest_bit(rows & ~now));
        warp::sync();  // all have read the bits, and the rows are acquired for every lane
        if (lane_index() == 0) *done |= now;
        ++done;
        rows = now;
      }
      std::byte* heap = params.common.heaps[row.source];
      const int first_expert = params.common.rank * params.num_local_experts;
      const int expert = first_expert + row.position / params.expert_rows();  // named by the row's tags
      each_bit(rows, [&](int k) {
        copy<kSignalled>(warp::shuffle(row.position, k), call.selected_row(params.num_topk, row.token, k).in(heap),
                         call.tag(static_cast<std::uint32_t>(warp::shuffle(expert, k))));
      });
      return true;
    });
    return missing;
  }

  /// This warp's share of the lines of row `position` of x. kWhileWritten: other rows of x may still be written.
  template <bool kWhileWritten>
  DEEP_EP_DEVICE void copy(std::int32_t position, std::byte* to, std::uint64_t tag) const {
    const WarpShare share{warp, params.warps_per_row};
    const auto* from = reinterpret_cast<const Vec16*>(params.x) + std::int64_t{position} * wire.vectors();
    std::uint32_t line = share.first_line();
#pragma unroll 1
    for (int left = share.steps(wire); left > 0; left -= kTogether) {
      Vec16 loaded[kTogether] = {};
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        const int vector = i < left ? wire.vector(line + i * share.step()) : -1;
        if (vector >= 0) loaded[i] = kWhileWritten ? load_weak(from + vector) : load_stream(from + vector);
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i, line += share.step()) {
        if (i < left) wire.store(to, line, loaded[i], tag);
      }
    }
  }

  /// The word that says that the row is there, and acquires it.
  DEEP_EP_DEVICE int signal_of(std::int32_t position) const {
    const LowLatencySignals& signals = params.signals;
    return position / params.expert_rows() * signals.words_of_expert +
           position % params.expert_rows() / signals.rows_of_word;
  }

  /// By one thread: ends the call if the signal has not come for too long.
  DEEP_EP_DEVICE void end_if_late(int word, std::uint64_t begin) const {
    const std::uint32_t seen = load_acquire<Scope::gpu>(params.signals.words + word);
    const std::uint32_t expected = params.signals.expected;
    const WaitContext& wait = params.common.wait;
    const int rank = params.common.rank;
    constexpr Wanted kWanted = Wanted::low_latency_combine_signal;
    if (seen >= expected || !may_be_late(begin) || !is_late_wait(wait, rank, kWanted, begin, [] {})) return;
    const auto expert = static_cast<std::uint64_t>(word / params.signals.words_of_expert);
    report_fault(wait, FaultKind::timeout, kWanted, rank, word, expert << 32 | expected, seen);
  }
};

/// One part of the call, as params.phase says.
DEEP_EP_DEVICE void combine_unreduced_body(const LowLatencyCombineParams& params, std::byte* memory) {
  const LowLatencyParams& common = params.common;
  const CombineWire wire{params.hidden};
  const int warp = warp_index();
  const bool last_warp = warp == block_warps() - 1;
  const bool sending = sends(params.phase);
  const int groups = block_warps() / params.warps_per_row;
  const int group = warp / params.warps_per_row;
  const int held_up = sending && params.signals.words != nullptr ? params.signals.rows_of_group : 0;
  const CombineShared shared(Carver(memory), 0, groups * held_up);

  // 1. Loads under way: the first row to push; or the selections of the first token to add, where two blocks share a
  // token if there are so many, and the last block has none.
  const bool pushes = sending && group < groups;
  UnreducedPusher pusher{
      params, wire, {params, group, groups}, warp % params.warps_per_row, shared.pushed + group * held_up};
  if (pushes) pusher.load_first(last_warp);
  block::each(groups * held_up, [&](int i) { shared.pushed[i] = 0; });
  const int by_two = 2 * params.num_tokens <= common.working_blocks ? 1 : 0;
  const int first = block_index() < common.working_blocks ? block_index() >> by_two : params.num_tokens;
  Selection loaded{};
  if (!sending && first < params.num_tokens && lane_index() < params.num_topk) {
    loaded = Selection::load(params, first, lane_index());
  }

  // 2. Which call is this?
  const LowLatencyEpochs epochs = read_epochs(params, *shared.words, last_warp);
  const UnreducedCall call(common, sending ? epochs.send : epochs.receive, params.row_bytes);

  // 3. Push, or add.
  if (sending) {
    // An earlier call, in one launch, may not have been acknowledged.
    if (last_warp && block_index() == 0) call.acknowledge_all(epochs.receive - 1);
    if (pushes) pusher.push_all(call);
  } else {
    if (block_index() == grid_blocks() - 1 && warp == 0) {  // a rank says so when it has sent all its rows
      await_meanings(call, Wanted::low_latency_combine_rows, shared.words->meaning);
    }
    const int member = (block_index() & by_two) * block_warps() + warp;
    const CombineAdder<false, true> adder{params, wire, call, shared.words->meaning, member, block_warps() << by_two,
                                          loaded, first};
    adder.add_all(first, common.working_blocks >> by_two);
  }

  // 4. The last block counts the call, and if it is not over tells the peers: that all rows are there, or that they may
  // send the call after the next. What others wrote in a send part is ordered before, and what they read in a receive
  // part.
  block::sync();
  if (warp != 0) return;
  LowLatencyCounters& counters = common.counters(LowLatencyKind::combine);
  const bool tells = lane_index() == 0 && (sending ? counters.arrive<Scope::system>(epochs, params.phase)
                                                   : counters.arrive(epochs, params.phase));
  if (!warp::any(tells && !aborted(common.wait))) return;
  warp::sync();
  if (!sending) return call.acknowledge_all(epochs.receive);
  fence<Scope::system>();  // releases what all blocks have sent
  announce_meaning(params, call, shared.words->meaning);
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(combine_low_latency_unreduced, deep_ep::device::low_latency::combine_unreduced_body)
