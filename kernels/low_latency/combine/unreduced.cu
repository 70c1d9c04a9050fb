// Low-latency combine of calls in two launches: every row that the dispatch brought goes to the token's owner as the
// expert left it, and the owner multiplies and adds. So the send part waits for no rank's selections, and a late rank
// holds up no other. A kernel of its own, as the one for calls in one launch has no room for its instructions.
//
//   send part     counters, row table, acknowledgements (one load time) -> rows of x, behind their signals if there
//                 are any (one load time) -> lines to the owners; all blocks are done -> word to all ranks
//   receive part  counters, selections (one load time) -> lines, as they are polled -> result; all blocks have read,
//                 all ranks have sent (one block waits for that alone) -> acknowledgements
//
// Places: rows of a token lie at [token][selection] in the owner's part of the window for combine, those of all ranks
// together. A row's tags name its expert: an owner that selects another one does not take it.
//
// Room: a sender writes to an owner that has acknowledged the call before the last. A rank acknowledges at the end of
// its receive part, when all ranks have told it that they have sent all their rows: so no row of an acknowledged call
// is under way, not even one that the rank did not want. It does not wait for its next call to do so, as ranks do
// elsewhere: with two calls in flight that next call is the very one whose rows would wait for it.
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
struct UnreducedPusher {
  static constexpr int kTogether = 4;  ///< lines of a thread whose loads are under way at once

  const LowLatencyCombineParams& params;
  const CombineWire& wire;
  ReceivedRows received;
  int warp;                ///< in the group
  CombineRow first{};      ///< the first row to push
  std::int32_t most = 0;   ///< rows of any source that this lane has seen
  std::uint64_t seen = 0;  ///< by the lane's first owner acknowledged when the kernel began ...
  bool looked = false;     ///< ... if this warp has looked then
  int sharing = 0;         ///< so many groups share a row: a power of two, by its exponent

  /// Starts the loads that do not depend on the call. The warp that reads the counters does not look for room yet:
  /// nothing of a warp comes before what it has acquired, and the block waits for what that warp loads next.
  DEEP_EP_DEVICE void load_first(bool reads_counters) {
    const UnreducedCall no_call(params.common, 0, params.row_bytes);
    const int groups = received.step();
    const int rows = params.common.num_ranks * params.max_tokens;
    while (rows << (sharing + 1) <= groups && 1 << sharing < params.num_topk) ++sharing;
    first = received.load_row(received.first_item() >> sharing);
    most = received.most_rows();
    looked = !reads_counters;
    if (looked && lane_index() < params.common.num_ranks) seen = no_call.load_acknowledged(lane_index());
  }

  /// By whole warps: all rows, once their owners have room.
  DEEP_EP_DEVICE void push_all(const UnreducedCall& call) const {
    if (!await_room(call)) return;
    const int end = warp::max(most) * params.common.num_ranks << sharing;
    CombineRow next = first;
#pragma unroll 1
    for (int item = received.first_item(); item < end; item += received.step()) {
      const CombineRow row = next;
      next = received.load_row((item + received.step()) >> sharing);
      if (row.index < row.rows) push(call, row, item & ((1 << sharing) - 1));
    }
  }

 protected:
  /// Waits until all owners have room. False: the call is over.
  DEEP_EP_DEVICE bool await_room(const UnreducedCall& call) const {
    bool there = true;
    warp::each(params.common.num_ranks, [&](int owner) {
      const bool known = looked && owner < kWarpSize;
      if (!call.has_room(known ? seen : call.load_acknowledged(owner))) there = call.await_room(owner) && there;
    });
    return warp::agree(there);  // what follows in other lanes comes after the owners' reads
  }

  /// What the tag of a row names.
  DEEP_EP_DEVICE std::uint32_t expert_at(std::int32_t position) const {
    const auto rank = static_cast<std::uint32_t>(params.common.rank);
    if (position < 0) return UnreducedCall::kNoRow | rank;
    const int expert_rows = params.common.num_ranks * params.max_tokens;
    return rank * static_cast<std::uint32_t>(params.num_local_experts) +
           static_cast<std::uint32_t>(position / expert_rows);
  }

  /// This warp's share of the lines of row `position` of x; zeros where that is negative. kWhileWritten: other rows of
  /// x may still be written.
  template <bool kWhileWritten = false>
  DEEP_EP_DEVICE void copy(std::int32_t position, std::byte* to, std::uint64_t tag) const {
    const WarpShare share{warp, params.warps_per_row};
    const int steps = share.steps(wire);
    const LineLane lane;
#pragma unroll 1
    for (int begin = 0; begin < steps; begin += kTogether) {
      LinePart part[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        part[i] = begin + i < steps ? load_part<kWhileWritten>(position, share.line(begin + i), tag) : LinePart{};
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (begin + i >= steps) continue;
        const std::uint32_t line = share.line(begin + i);
        store_line(to + lane.byte_at(line), part[i], line < wire.lines());
      }
    }
  }

 private:
  /// Those of the row's selections on this rank that are the group's.
  DEEP_EP_DEVICE void push(const UnreducedCall& call, const CombineRow& row, int member) const {
    std::byte* heap = params.common.heaps[row.source];
    const std::uint32_t expert = expert_at(row.position);
    const bool here = row.position >= 0 || row.position == LowLatencyRowTable::kNoRoom;
    int turn = 0;
#pragma unroll 1
    for (std::uint32_t rows = warp::ballot(here); rows != 0; rows &= rows - 1, ++turn) {
      if ((turn & ((1 << sharing) - 1)) != member) continue;
      const int k = lowest_bit(rows);
      copy(warp::shuffle(row.position, k), call.selected_row(heap, params.num_topk, row.token, k),
           call.tag(warp::shuffle(expert, k)));
    }
  }

  template <bool kWhileWritten, class T>
  DEEP_EP_DEVICE static T load_x(const T* from) {
    return kWhileWritten ? load_weak(from) : load_stream(from);
  }

  /// This lane's part of a line. Lines begin at multiples of 8 bytes of a row.
  template <bool kWhileWritten>
  DEEP_EP_DEVICE LinePart load_part(std::int32_t position, std::uint32_t line, std::uint64_t tag) const {
    const LineLane lane;
    const auto bytes = 2 * static_cast<std::uint32_t>(params.hidden);
    const std::uint32_t at = lane.payload_at(line);
    LinePart part{{0, lane.has_tag() ? tag : 0}};
    if (position < 0) return part;
    const auto* words = reinterpret_cast<const std::uint64_t*>(params.x + std::int64_t{position} * bytes + at);
    if (at < bytes) part.word[0] = load_x<kWhileWritten>(words);
    if (!lane.has_tag() && at + 8 < bytes) part.word[1] = load_x<kWhileWritten>(words + 1);
    return part;
  }
};

/// The expert side while the program still computes the rows (single-batch overlap): its GEMM runs beside the send
/// part, on other SMs, and raises signals. A row is read once its signal is there, and none that is there waits for
/// another: every block lists its selections, and its warps go round among those that are left.
struct SignalledPusher : UnreducedPusher {
  const CombineShared& shared;

  /// By all threads of the block, with shared.words->listed at 0: lists the block's selections that have a row on this
  /// rank. The block syncs after it.
  DEEP_EP_DEVICE void list_selections() const {
    const LowLatencyRowTable table = received.table();
    const int rows = params.common.num_ranks * params.max_tokens;
    const int step = params.common.working_blocks;
#pragma unroll 1
    for (int i = thread_index();; i += block_threads()) {
      const int row = block_index() + i / params.num_topk * step;
      if (row >= rows) return;
      const int source = row % params.common.num_ranks;  // neighbouring rows belong to different owners
      const int index = row / params.common.num_ranks;
      const int k = i % params.num_topk;
      if (index >= load_stream(table.rows(source))) continue;
      if (load_stream(table.position(source, index, k)) == -1) continue;
      const std::uint32_t place = fetch_add_relaxed<Scope::block>(&shared.words->listed, 1u);
      shared.list[place] = static_cast<std::uint32_t>(row * params.num_topk + k);
    }
  }

  /// By whole warps: each has every so many-th of the block's selections.
  DEEP_EP_DEVICE void push_listed(const UnreducedCall& call) const {
    if (!await_room(call)) return;
    const int warps = block_warps();
    int count = (static_cast<int>(shared.words->listed) - warp_index() + warps - 1) / warps;
    const auto all_pushed = [&](const Poll&) {
      count = push_ready(call, count);
      return count == 0;
    };
    poll_until<16>(all_pushed, [&](const Poll& poll) {
      warp::sync();
      if (lane_index() == 0) look_at_first(poll.begin);
      return warp::any(aborted(params.common.wait));
    });
  }

 private:
  struct Selected {
    int source, index, k;
    std::int32_t position;  ///< negative: its expert had no room for the row
  };

  DEEP_EP_DEVICE std::uint32_t* entry(int i) const { return shared.list + warp_index() + i * block_warps(); }

  DEEP_EP_DEVICE Selected load(std::uint32_t listed) const {
    const auto number = static_cast<int>(listed);
    const int row = number / params.num_topk;
    Selected of{row % params.common.num_ranks, row / params.common.num_ranks, number % params.num_topk, -1};
    of.position = load_stream(received.table().position(of.source, of.index, of.k));
    return of;
  }

  /// The word that says that the row is there.
  DEEP_EP_DEVICE int word_of(std::int32_t position) const {
    const int expert_rows = params.common.num_ranks * params.max_tokens;
    const LowLatencySignals& signals = params.signals;
    return position / expert_rows * signals.words_of_expert + position % expert_rows / signals.rows_of_word;
  }
  /// Acquires the row.
  DEEP_EP_DEVICE std::uint32_t signal(int word) const { return load_acquire<Scope::gpu>(params.signals.words + word); }

  /// Pushes those of the warp's first `count` selections whose rows are there. Returns how many are left; these come
  /// first then.
  DEEP_EP_DEVICE int push_ready(const UnreducedCall& call, int count) const {
    const std::uint32_t below = (1u << lane_index()) - 1;
    int kept = 0;
#pragma unroll 1
    for (int begin = 0; begin < count; begin += kWarpSize) {
      const bool wanted = begin + lane_index() < count;
      const std::uint32_t listed = wanted ? *entry(begin + lane_index()) : 0;
      const Selected of = load(listed);
      const bool ready = wanted && (of.position < 0 || signal(word_of(of.position)) >= params.signals.expected);
      const std::uint32_t rest = warp::ballot(wanted && !ready);
      const std::uint32_t now = warp::ballot(ready);
      warp::sync();  // all have read their entries, and the rows are acquired for every lane
      if (wanted && !ready) *entry(kept + count_bits(rest & below)) = listed;
      kept += count_bits(rest);
      each_bit(now, [&](int lane) {
        const int source = warp::shuffle(of.source, lane), index = warp::shuffle(of.index, lane);
        const int k = warp::shuffle(of.k, lane);
        const std::int32_t position = warp::shuffle(of.position, lane);
        const int token = load_stream(received.table().token(source, index));
        copy<true>(position, call.selected_row(params.common.heaps[source], params.num_topk, token, k),
                   call.tag(expert_at(position)));
      });
    }
    warp::sync();
    return kept;
  }

  /// By one thread: ends the call if the first selection that is left has waited for its signal for too long.
  DEEP_EP_DEVICE void look_at_first(std::uint64_t begin) const {
    const Selected of = load(*entry(0));
    const std::uint32_t expected = params.signals.expected;
    if (of.position < 0) return;
    const int word = word_of(of.position);
    const std::uint32_t seen = signal(word);
    if (seen >= expected) return;
    const Awaited awaited{params.common.rank, Wanted::low_latency_combine_signal, expected};
    if (!may_be_late(begin) || !is_late_wait(params.common.wait, awaited.peer, awaited.wanted, begin)) return;
    const auto expert = static_cast<std::uint64_t>(word / params.signals.words_of_expert);
    report_fault(params.common.wait, FaultKind::timeout, awaited.wanted, awaited.peer, word, expert << 32 | expected,
                 seen);
  }
};

/// By all threads of all blocks, when their warps have done their part `phase` of the call. True in all lanes of the
/// one warp that comes last; in none if the call is over. That warp also counts the call. What others wrote in a send
/// part is ordered before, and what they read in a receive part.
DEEP_EP_DEVICE bool last_warp_to_finish(const LowLatencyParams& common, const LowLatencyEpochs& epochs,
                                        LowLatencyPhase phase) {
  block::sync();
  if (warp_index() != 0) return false;
  bool speaks = false;
  if (lane_index() == 0) {
    LowLatencyCounters& counters = common.counters(LowLatencyKind::combine);
    const auto blocks = static_cast<std::uint32_t>(grid_blocks());
    const bool last = sends(phase) ? last_to_arrive<Scope::system>(&counters.finished, blocks)
                                   : last_to_arrive<Scope::gpu>(&counters.finished, blocks);
    if (last && sends(phase)) counters.sent.count(epochs.send);
    if (last && !sends(phase)) counters.received.count(epochs.receive);
    speaks = last && !aborted(common.wait);
  }
  speaks = warp::any(speaks);
  warp::sync();
  return speaks;
}

/// One part of the call, as params.phase says.
DEEP_EP_DEVICE void combine_unreduced_body(const LowLatencyCombineParams& params, std::byte* memory) {
  using Adder = CombineAdder<false, true>;
  const LowLatencyParams& common = params.common;
  const CombineWire wire{params.hidden};
  const int warp = warp_index();
  const bool last_warp = warp == block_warps() - 1;
  const bool sending = sends(params.phase);
  const bool signalled = sending && params.signals.words != nullptr;
  const CombineShared shared(Carver(memory), block_warps(), 0, 0, signalled ? params.signals.selections : 0);

  // 1. Loads under way: the first row to push; or the selections of the first token to add, where two blocks share a
  // token if there are so many, and the last block has none.
  const int groups = block_warps() / params.warps_per_row;
  const int group = warp / params.warps_per_row;
  const bool pushes = sending && group < groups;
  SignalledPusher pusher{{params, wire, {params, group, groups}, warp % params.warps_per_row}, shared};
  if (pushes && !signalled) pusher.load_first(last_warp);
  if (thread_index() == 0) shared.words->listed = 0;
  const int by_two = 2 * params.num_tokens <= common.working_blocks ? 1 : 0;
  const int first = block_index() < common.working_blocks ? block_index() >> by_two : params.num_tokens;
  LoadedSelection loaded{};
  if (!sending && first < params.num_tokens && lane_index() < params.num_topk) {
    loaded = Selections{params}.load(first, lane_index());
  }

  // 2. Which call is this?
  const LowLatencyEpochs epochs = read_epochs(params, *shared.words, last_warp);
  const UnreducedCall call(common, sending ? epochs.send : epochs.receive, params.row_bytes);

  // 3. Push, or add.
  if (sending) {
    // An earlier call, in one launch, may not have been acknowledged.
    if (last_warp && block_index() == 0) call.acknowledge_all(epochs.receive - 1);
    if (signalled) {
      pusher.list_selections();
      block::sync();
      pusher.push_listed(call);
    } else if (pushes) {
      pusher.push_all(call);
    }
  } else {
    if (block_index() == grid_blocks() - 1 && warp == 0) UnreducedSurvey{params, call}.await_all_sent();
    const int member = (block_index() & by_two) * block_warps() + warp;
    const Adder adder{params, wire, call, member, block_warps() << by_two, loaded, first};
    adder.add_all(first, common.working_blocks >> by_two);
  }

  // 4. The last block counts the call, and tells the peers: that all rows are there, or that they may send the call
  // after the next.
  if (!last_warp_to_finish(common, epochs, params.phase)) return;
  if (!sending) return call.acknowledge_all(epochs.receive);
  warp::each(common.num_ranks, [&](int peer) { call.tell_sent(peer, shared.words->meaning); });
}

}  // namespace deep_ep::device::low_latency

DEEP_EP_DEFINE_KERNEL(combine_low_latency_unreduced, deep_ep::device::low_latency::combine_unreduced_body)
