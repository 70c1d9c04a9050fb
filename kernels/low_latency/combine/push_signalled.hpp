// The expert side of combine while the program still computes the rows (single-batch overlap): its GEMM runs beside the
// send part, on other SMs, and raises signals. A row is read once its signal is there, and none that is there waits for
// another: every block lists its selections, and its warps go round among those that are left.
#pragma once

#include "kernels/low_latency/combine/push_unreduced.hpp"

namespace deep_ep::device::low_latency {

template <bool kFp8>
struct SignalledPusher : UnreducedPusher<kFp8> {
  using Base = UnreducedPusher<kFp8>;
  const CombineShared& shared;

  /// By all threads of the block, with shared.words->listed at 0: lists the block's selections that have a row on this
  /// rank. The block syncs after it.
  DEEP_EP_DEVICE void list_selections() const {
    const LowLatencyCombineParams& params = this->params;
    const LowLatencyRowTable table = this->received.table();
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

  /// By whole warps: each has every so many-th of the block's selections. False: the call is over.
  DEEP_EP_DEVICE bool push_listed(const UnreducedReach& reach) {
    const LowLatencyCombineParams& params = this->params;
    const int warps = block_warps();
    int count = (static_cast<int>(shared.words->listed) - warp_index() + warps - 1) / warps;
#pragma unroll
    for (int i = 0; i < Base::kRanksOfLane; ++i) {
      this->left |= Base::owner(i) < params.common.num_ranks ? 1u << i : 0;
    }
    std::uint32_t opened = 0;
    const auto all_pushed = [&](const Poll&) {
      this->find_room(reach, false);
      this->left &= ~this->open;
      opened |= this->open;
      this->open = opened;
      count = push_ready(reach, count);
      return count == 0;
    };
    return poll_until<16>(all_pushed, [&](const Poll& look) {
      if (this->left != 0) {
        const Awaited credit{Base::owner(lowest_bit(this->left)), Wanted::low_latency_combine_credit, reach.epoch - 2};
        if (reach.policy().is_late(credit, look.begin)) reach.policy().blame(credit, 0);
      }
      warp::sync();
      if (lane_index() == 0) look_at_first(reach, look.begin);
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
    const LowLatencyCombineParams& params = this->params;
    const auto number = static_cast<int>(listed);
    const int row = number / params.num_topk;
    Selected of{row % params.common.num_ranks, row / params.common.num_ranks, number % params.num_topk, -1};
    of.position = load_stream(this->received.table().position(of.source, of.index, of.k));
    return of;
  }

  /// The word that says that the row is there.
  DEEP_EP_DEVICE int word_of(std::int32_t position) const {
    const int expert_rows = this->params.common.num_ranks * this->params.max_tokens;
    const LowLatencySignals& signals = this->params.signals;
    return position / expert_rows * signals.words_of_expert + position % expert_rows / signals.rows_of_word;
  }
  /// Acquires the row.
  DEEP_EP_DEVICE std::uint32_t signal(int word) const {
    return load_acquire<Scope::gpu>(this->params.signals.words + word);
  }

  /// Pushes those of the warp's first `count` selections whose rows are there. Returns how many are left; these come
  /// first then.
  DEEP_EP_DEVICE int push_ready(const UnreducedReach& reach, int count) const {
    const std::uint32_t below = (1u << lane_index()) - 1;
    int kept = 0;
#pragma unroll 1
    for (int begin = 0; begin < count; begin += kWarpSize) {
      const bool wanted = begin + lane_index() < count;
      const std::uint32_t listed = wanted ? *entry(begin + lane_index()) : 0;
      const Selected of = load(listed);
      const bool open = this->is_open(of.source);
      const bool ready =
          wanted && open && (of.position < 0 || signal(word_of(of.position)) >= this->params.signals.expected);
      const std::uint32_t rest = warp::ballot(wanted && !ready);
      std::uint32_t now = warp::ballot(ready);
      warp::sync();  // all have read their entries, and the rows are acquired for every lane
      if (wanted && !ready) *entry(kept + count_bits(rest & below)) = listed;
      kept += count_bits(rest);
#pragma unroll 1
      for (; now != 0; now &= now - 1) {
        const int lane = lowest_bit(now);
        push_row(reach, {warp::shuffle(of.source, lane), warp::shuffle(of.index, lane), warp::shuffle(of.k, lane),
                         warp::shuffle(of.position, lane)});
      }
    }
    warp::sync();
    return kept;
  }

  DEEP_EP_DEVICE void push_row(const UnreducedReach& reach, const Selected& of) const {
    const LowLatencyCombineParams& params = this->params;
    const int token = load_stream(this->received.table().token(of.source, of.index));
    const auto rank = static_cast<std::uint32_t>(params.common.rank);
    const std::uint32_t expert =
        of.position < 0 ? UnreducedReach::kNoRow | rank
                        : rank * static_cast<std::uint32_t>(params.num_local_experts) +
                              static_cast<std::uint32_t>(of.position / (params.common.num_ranks * params.max_tokens));
    std::byte* to = reach.row_in_turn(params.common.heaps[of.source], params.num_topk, token, of.k);
    if constexpr (kFp8) {
      this->template cast<true>(of.position, to, reach.tag(expert));
    } else {
      this->template copy<true>(of.position, to, reach.tag(expert));
    }
  }

  /// By one thread: ends the call if the first selection that is left has waited for its signal for too long.
  DEEP_EP_DEVICE void look_at_first(const UnreducedReach& reach, std::uint64_t begin) const {
    const LowLatencyCombineParams& params = this->params;
    const Selected of = load(*entry(0));
    const std::uint32_t expected = params.signals.expected;
    if (of.position < 0) return;
    const int word = word_of(of.position);
    const std::uint32_t seen = signal(word);
    if (seen >= expected) return;
    const Awaited awaited{params.common.rank, Wanted::low_latency_combine_signal, expected};
    if (!reach.policy().is_late(awaited, begin)) return;
    const auto expert = static_cast<std::uint64_t>(word / params.signals.words_of_expert);
    report_fault(params.common.wait, FaultKind::timeout, awaited.wanted, awaited.peer, word, expert << 32 | expected,
                 seen);
  }
};

}  // namespace deep_ep::device::low_latency
