// The expert side of combine where nothing is added up before the owner does: each row goes to its owner as it is.
#pragma once

#include "kernels/common/wait.hpp"
#include "kernels/low_latency/combine/shared.hpp"
#include "kernels/low_latency/combine/unreduced.hpp"

namespace deep_ep::device::low_latency {

/// Groups of warps take rows in turn, and the warps of a group share a row by its lines. Where there are more groups
/// than rows, so many share the selections of a row: a group that copies one after the other waits for memory each
/// time. Owners that have not yet acknowledged the call before the last have to wait for their rows until all others
/// have theirs.
template <bool kFp8>
struct UnreducedPusher {
  static constexpr int kTogether = 4;  ///< lines of a thread whose loads are under way at once
  static constexpr int kRanksOfLane = (kMaxRanks + kWarpSize - 1) / kWarpSize;

  const LowLatencyCombineParams& params;
  const CombineWire& wire;
  ReceivedRows received;
  int warp;                ///< in the group
  std::byte* stage;        ///< FP8 only
  CombineRow first{};      ///< the first row to push
  std::int32_t most = 0;   ///< rows of any source that this lane has seen
  std::uint64_t seen = 0;  ///< by the lane's first owner acknowledged when the kernel began ...
  bool looked = false;     ///< ... if this warp has looked then
  int sharing = 0;         ///< so many groups share a row: a power of two, by its exponent
  std::uint32_t left = 0;  ///< bit i: the lane's i-th owner, rank i * 32 + lane, has not got its rows
  std::uint32_t open = 0;  ///< the same: it gets them now

  /// Starts the loads that do not depend on the call. The clerk does not look for room yet: nothing of a warp comes
  /// before what it has acquired, and the block waits for what the clerk loads next.
  DEEP_EP_DEVICE void load_first(bool clerk) {
    const UnreducedReach no_call(params.common, 0, params.row_bytes);
    const int groups = received.step();
    const int rows = params.common.num_ranks * params.max_tokens;
    while (rows << (sharing + 1) <= groups && 1 << sharing < params.num_topk) ++sharing;
    first = received.load_row(received.first_item() >> sharing);
    most = received.most_rows();
    looked = !clerk;
    if (looked && owner(0) < params.common.num_ranks) seen = no_call.load_acknowledged(owner(0));
  }

  /// By whole warps. False: the call is over.
  DEEP_EP_DEVICE bool push_all(const UnreducedReach& reach) {
#pragma unroll
    for (int i = 0; i < kRanksOfLane; ++i) left |= owner(i) < params.common.num_ranks ? 1u << i : 0;
    const int end = warp::max(most) * params.common.num_ranks << sharing;
    bool begins = looked;
    const auto all_pushed = [&](const Poll&) {
      find_room(reach, begins);
      begins = false;
      if (warp::any(open != 0)) push_open(reach, end);
      left &= ~open;
      return !warp::any(left != 0);
    };
    return poll_until<16>(all_pushed, [&](const Poll& look) {
      if (left != 0) {
        const Awaited credit{owner(lowest_bit(left)), Wanted::low_latency_combine_credit, reach.epoch - 2};
        if (reach.policy().is_late(credit, look.begin)) reach.policy().blame(credit, 0);
      }
      return warp::any(aborted(params.common.wait));
    });
  }

  // Steps of it.

  DEEP_EP_DEVICE static int owner(int i) { return i * kWarpSize + lane_index(); }

  DEEP_EP_DEVICE void find_room(const UnreducedReach& reach, bool begins) {
    open = 0;
#pragma unroll 1
    for (std::uint32_t bits = left; bits != 0; bits &= bits - 1) {
      const int i = lowest_bit(bits);
      if (reach.has_room(begins && i == 0 ? seen : reach.load_acknowledged(owner(i)))) open |= 1u << i;
    }
    warp::sync();  // what follows in other lanes comes after the owner's reads
  }
  DEEP_EP_DEVICE bool is_open(int source) const {
    return (warp::shuffle(open, source % kWarpSize) >> (source / kWarpSize) & 1u) != 0;
  }

  DEEP_EP_DEVICE void push_open(const UnreducedReach& reach, int end) {
    int item = received.first_item();
    CombineRow next = first.rows >= 0 ? first : received.load_row(item >> sharing);
    first.rows = -1;  // it has been used
#pragma unroll 1
    for (; item < end; item += received.step()) {
      const CombineRow row = next;
      next = received.load_row((item + received.step()) >> sharing);
      if (row.index < row.rows && is_open(row.source)) push(reach, row, item & ((1 << sharing) - 1));
    }
  }

  /// Those of the row's selections on this rank that are the group's.
  DEEP_EP_DEVICE void push(const UnreducedReach& reach, const CombineRow& row, int member) const {
    std::byte* heap = params.common.heaps[row.source];
    const int expert_rows = params.common.num_ranks * params.max_tokens;
    const auto rank = static_cast<std::uint32_t>(params.common.rank);
    std::uint32_t expert = 0;
    if (!params.rank_major) {
      expert = row.position < 0 ? UnreducedReach::kNoRow | rank
                                : rank * static_cast<std::uint32_t>(params.num_local_experts) +
                                      static_cast<std::uint32_t>(row.position / expert_rows);
    }
    const bool here = row.position >= 0 || row.position == LowLatencyRowTable::kNoRoom;
    int turn = 0;
#pragma unroll 1
    for (std::uint32_t rows = warp::ballot(here); rows != 0; rows &= rows - 1, ++turn) {
      if ((turn & ((1 << sharing) - 1)) != member) continue;
      const int k = lowest_bit(rows);
      std::byte* to = params.rank_major ? reach.row(heap, params.common.rank, row.token)
                                        : reach.row_in_turn(heap, params.num_topk, row.token, k);
      const std::int32_t position = warp::shuffle(row.position, k);
      const std::uint64_t tag = reach.tag(warp::shuffle(expert, k));
      if constexpr (kFp8) {
        cast(position, to, tag);
      } else {
        copy(position, to, tag);
      }
    }
  }

  /// This warp's share of the lines of row `position` of x; of zeros where that is negative. kWhileWritten: other rows
  /// of x may still be written.
  template <bool kWhileWritten = false>
  DEEP_EP_DEVICE void copy(std::int32_t position, std::byte* to, std::uint64_t tag) const {
    const WarpShare<false> share{warp, params.warps_per_row};
    const int steps = share.steps(wire);
    const LineLane lane;
    const auto line_of = [&](int step) {
      return static_cast<std::uint32_t>(share.unit(step) * kWarpLines + lane.line);
    };
#pragma unroll 1
    for (int begin = 0; begin < steps; begin += kTogether) {
      LinePart part[kTogether];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        part[i] = begin + i < steps ? load_part<kWhileWritten>(position, line_of(begin + i), tag) : LinePart{};
      }
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
        if (begin + i >= steps) continue;
        const std::uint32_t line = line_of(begin + i);
        store_line(to + lane.byte_at(line), part[i], line < wire.lines());
      }
    }
  }

  /// The same in FP8, pass by pass.
  template <bool kWhileWritten = false>
  DEEP_EP_DEVICE void cast(std::int32_t position, std::byte* to, std::uint64_t tag) const {
    constexpr int kSteps = WarpShare<true>::kSteps;
    const WarpShare<true> share{warp, params.warps_per_row};
    const std::int64_t number = position < 0 ? 0 : position;
    const Vec16* row = reinterpret_cast<const Vec16*>(params.x) + number * wire.vectors();
#pragma unroll 1
    for (int step = 0; step < share.steps(wire); step += kSteps) {
      Vec16 loaded[kSteps] = {};
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        const int vector = share.vector(wire, step + i);
        if (position >= 0 && vector >= 0) loaded[i] = load_x<kWhileWritten>(row + vector);
      }
#pragma unroll
      for (int i = 0; i < kSteps; ++i) {
        if (share.vector(wire, step + i) >= 0) *share.staged(stage, i) = loaded[i];
      }
      warp::sync();
      store_fp8_pass(wire, stage, share.pass(step), to, tag);
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

}  // namespace deep_ep::device::low_latency
