// The expert side of combine: for each row that the dispatch brought, what this rank's experts made of the token,
// weighted, summed and rounded, goes to the token's owner as one row.
//
// Groups of warps take rows in turn. Neighbouring rows belong to different owners, so that all links are busy at once,
// and every owner's rows go in token order, so that it can begin to add. The warps of a group share a row by its lines
// and need nothing of each other: each looks for the owner's selections, sums its channels and stores its lines. Rows
// whose owner has not told its selections for a while are put off until all others are done: a rank that does not come
// must not make others look late.
#pragma once

#include "kernels/low_latency/combine/shared.hpp"
#include "kernels/low_latency/combine/sum.hpp"
#include "kernels/low_latency/combine/wait.hpp"
#include "kernels/low_latency/transport/peer.hpp"

namespace deep_ep::device::low_latency {

template <bool kLogfmt, bool kRdma>
struct CombinePusher {
  const LowLatencyCombineParams& params;
  const CombineWire& wire;
  int group, groups;       ///< in the block
  int warp;                ///< in the group
  std::uint32_t* put_off;  ///< for each row that falls to this warp: has it been put off?
  std::byte* stage;
  std::uint64_t epoch = 0;
  CombineRow next{};      ///< the next row to push
  std::int32_t most = 0;  ///< rows of any source that this lane has seen

  /// How long rows wait in turn for their owner, in nanoseconds. Where ranks are masked, a late one should cost little;
  /// else the call needs all ranks anyway, and it matters only who is named in the end.
  DEEP_EP_DEVICE std::uint64_t patience() const {
    const LowLatencyParams& common = params.common;
    if (common.mask != nullptr) return 50'000;
    return common.wait.timeout_ns == 0 ? ~std::uint64_t{0} : common.wait.timeout_ns / 4;
  }

  /// Starts the loads that do not depend on the call.
  DEEP_EP_DEVICE void load_first() {
    next = load_row(first_item());
    most = most_rows();
  }

  /// All rows in turn; then again and again those that were put off.
  DEEP_EP_DEVICE void push_all(std::uint64_t of_call) {
    epoch = of_call;
    const int end = warp::max(most) * params.common.num_ranks;
    const std::uint64_t start = now_ns();
    int waiting = 0;
#pragma unroll 1
    for (int pass = 0;; ++pass) {
#pragma unroll 1
      for (int index = 0, item = first_item(); item < end; ++index, item += step()) {
        const bool put_off_before = pass > 0 && (put_off[index / 32] & bit(index)) != 0;
        if (pass > 0 && !put_off_before) continue;
        if (pass == 0 && index % 32 == 0) set_bits(index, 0);
        CombineRow row = next;
        next = load_row(pass == 0 ? item + step() : item);
        if (pass > 0) row = next;
        if (row.index >= row.rows) continue;
        const bool lost = pass == 0 ? left_out(row.source) : gives_up(row.source, start);
        const bool late = !lost && !push(row, pass == 0 ? patience() : 0, start);
        if (late == put_off_before) continue;
        set_bits(index, put_off[index / 32] ^ bit(index));
        waiting += late ? 1 : -1;
      }
      if (waiting == 0 || warp::any(aborted(params.common.wait))) return;
      pause(pass + 1);
    }
  }

 private:
  DEEP_EP_DEVICE RowTable table() const {
    return {const_cast<std::int32_t*>(params.row_table), params.common.num_ranks, params.max_tokens, params.num_topk};
  }

  /// Block by block rather than group by group: with few rows every SM has some.
  DEEP_EP_DEVICE int first_item() const { return group * params.common.working_blocks + block_index(); }
  DEEP_EP_DEVICE int step() const { return groups * params.common.working_blocks; }

  /// The most rows that this lane's sources have.
  DEEP_EP_DEVICE std::int32_t most_rows() const {
    const int ranks = params.common.num_ranks;
    std::int32_t most = lane_index() < ranks ? load_stream(table().rows(lane_index())) : 0;  // nothing waits for it yet
#pragma unroll 1
    for (int source = lane_index() + kWarpSize; source < ranks; source += kWarpSize) {
      const std::int32_t rows = load_stream(table().rows(source));
      most = rows > most ? rows : most;
    }
    return most;
  }

  /// Loads what there may be to know of row number `item`, before it is known whether there is such a row.
  DEEP_EP_DEVICE CombineRow load_row(int item) const {
    const Divisor& ranks = params.common.num_ranks;
    CombineRow row{};
    row.index = item / ranks;
    if (row.index >= params.max_tokens) return row;
    // The sources take turns in another order each time: otherwise a group could meet the same one always.
    row.source = (item + row.index + params.common.rank) % ranks;
    row.rows = load_stream(table().rows(row.source));
    row.token = load_stream(table().token(row.source, row.index));
    row.position = -1;
    if (params.rank_major) {
      if (lane_index() == 0) row.position = row.source * params.max_tokens + row.index;
    } else if (lane_index() < params.num_topk) {
      row.position = load_stream(table().position(row.source, row.index, lane_index()));
    }
    return row;
  }

  DEEP_EP_DEVICE static std::uint32_t bit(int index) { return 1u << (index % 32); }
  DEEP_EP_DEVICE void set_bits(int index, std::uint32_t bits) const {
    warp::sync();
    if (lane_index() == 0) put_off[index / 32] = bits;
    warp::sync();
  }

  /// The same for all lanes, even while another warp masks the rank.
  DEEP_EP_DEVICE bool left_out(int source) const { return warp::any(masked(params.common, source)); }

  /// Makes the choice if the owner tells its selections in a while: one that is hardly late is waited for, so that what
  /// was loaded in advance is of use. False after a fault, too.
  DEEP_EP_DEVICE bool choose(const CombineRow& row, std::uint64_t patience_ns, std::uint64_t start,
                             CombineChoice& choice) const {
    std::int64_t begin = 0;
    bool chosen = false;
#pragma unroll 1
    for (int spins = 1;; ++spins) {
      chosen = RowChooser<kRdma>{params, epoch}.choose(row, choice);
      if (chosen || patience_ns == 0) break;
      if (spins == 1) begin = clock_cycles();
      pause(spins);
      if (spins % 16 != 0) continue;
      if (!warp::any(now_ns() - start < patience_ns) || warp::any(aborted(params.common.wait))) break;
    }
    if (begin != 0 && params.wait_cost != nullptr && warp == 0 && lane_index() == 0) {
      add_relaxed<Scope::gpu>(params.wait_cost + row.source, clock_cycles() - begin);
    }
    return chosen;
  }

  /// Is `source` left out? When its time has run out, it is from now on (or the call ends).
  DEEP_EP_DEVICE bool gives_up(int source, std::uint64_t start) const {
    const LowLatencyParams& common = params.common;
    if (lane_index() == 0 && !masked(common, source) && is_late(common, source, epoch, start)) {
      blame_for(source);
    }
    warp::sync();
    return left_out(source);
  }

  /// Whose word has not come: the owner's, or by rails that of who adds up the rows for it.
  DEEP_EP_DEVICE void blame_for(int source) const {
    const LowLatencyParams& common = params.common;
    if constexpr (kRdma) {
      const Rails rails(common);
      if (rails.used() && is_far(common, source) &&
          load_relaxed<Scope::system>(progress_word(common, LowLatencyKind::combine, epoch, source)) >> 16 >= epoch) {
        return blame(common, rails.relay_of(source), Wanted::low_latency_combine_credit, epoch - 2, 0);
      }
    }
    blame(common, source, Wanted::low_latency_combine_selection, epoch, 0);
  }

  /// This warp's share of the row, to its owner. False: it has not said yet what it wants.
  DEEP_EP_DEVICE bool push(const CombineRow& row, std::uint64_t patience_ns, std::uint64_t start) const {
    const LowLatencyParams& common = params.common;
    const WarpShare<kLogfmt> share{warp, params.warps_per_row};
    const RowSummer<kLogfmt> summer{reinterpret_cast<const Vec16*>(params.x), wire, share};
    const bool far = is_far<kRdma>(common, row.source);
    const bool by_rails = far && common.rdma.rail_width != 0;
    std::byte* to =
        by_rails ? at_relay(row)
        : far    ? common.local + common.rdma.staging.combine_row_at(epoch, row.source, row.index, params.row_bytes)
                 : common.heaps[row.source] +
                    common.window.row_at(LowLatencyKind::combine, epoch, common.rank, row.token, params.row_bytes);
    const auto chosen = [&](CombineChoice& choice) { return choose(row, patience_ns, start, choice); };
    const Summed summed = summer.sum(row.position, stage, chosen, [&](int step) { store(share, step, to); });
    warp::sync();  // the stage has been read
    if (far && !by_rails && summed != Summed::not_told) {
      hand_to_poster(row, summed == Summed::yes ? epoch : no_row_flag(epoch));
    }
    return summed != Summed::not_told;
  }

  /// Where the row of a far owner goes by rails: to the rank of this node that adds up what the node has to say.
  DEEP_EP_DEVICE std::byte* at_relay(const CombineRow& row) const {
    const LowLatencyParams& common = params.common;
    const Rails rails(common);
    return combine_row_at_relay(params, epoch, row.source, common.rank, row.token,
                                common.heaps[rails.relay_of(row.source)]);
  }

  /// This warp's share of a row for a rank that is reached by RDMA is in the staging memory, or there is no such row.
  DEEP_EP_DEVICE void hand_to_poster(const CombineRow& row, std::uint64_t flag) const {
    const LowLatencyParams& common = params.common;
    if (lane_index() != 0) return;
    Peer{common.local}.signal(common.rdma.staging.combine_ready_at(epoch, row.source, row.index, warp), flag);
  }

  /// What a step has brought to an end, to the owner.
  DEEP_EP_DEVICE void store(const WarpShare<kLogfmt>& share, int step, std::byte* to) const {
    if constexpr (kLogfmt) {
      constexpr int kSteps = WarpShare<true>::kSteps;
      if (step % kSteps != kSteps - 1) return;
      const PassStage of_pass{wire, stage + static_cast<std::size_t>(step / kSteps) * CombineWire::kStageBytes,
                              share.pass(step)};
      of_pass.encode();
      store_pass(of_pass, to);
    } else {
      const LineLane lane;
      const auto line = static_cast<std::uint32_t>(share.unit(step) * kWarpLines + lane.line);
      const std::byte* from = stage + static_cast<std::size_t>(step) * kWarpLines * kTaggedPayload;
      const LinePart part = staged_part(from, static_cast<std::uint32_t>(lane.line), epoch);
      store_line(to + lane.byte_at(line), part, line < wire.lines());
    }
  }

  DEEP_EP_DEVICE void store_pass(const PassStage& of_pass, std::byte* to) const {
    const LineLane lane;
#pragma unroll 1
    for (int chunk = of_pass.first_chunk(); chunk < of_pass.end_chunk(); ++chunk) {
      const std::uint32_t lines = wire.lines_of_chunk(chunk, of_pass.encoded(chunk));
      std::byte* begin = to + static_cast<std::size_t>(chunk) * wire.chunk_lines() * kTaggedLine;
#pragma unroll 1
      for (std::uint32_t first = 0; first < lines; first += kWarpLines) {
        const std::uint32_t line = first + static_cast<std::uint32_t>(lane.line);
        const bool wanted = line < lines;
        const LinePart part = wanted ? staged_part(of_pass.chunk(chunk), line, epoch) : LinePart{};
        store_line(begin + lane.byte_at(line), part, wanted);
      }
    }
  }
};

}  // namespace deep_ep::device::low_latency
