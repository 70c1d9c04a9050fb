// The expert side of combine: for each row that the dispatch brought, what this rank's experts made of the token,
// weighted, summed and rounded, goes to the token's owner as one row.
//
// Groups of warps take rows in turn. Neighbouring rows belong to different owners, so that all links are busy at once,
// and every owner's rows go in token order, so that it can begin to add. The warps of a group share a row by its lines
// and need nothing of each other: each looks for the owner's selections, sums its channels and stores its lines. Rows
// whose owner has not told its selections for a while are put off until all others are done: a rank that does not come
// must not make others look late.
#pragma once

#include "kernels/low_latency/combine_shared.hpp"
#include "kernels/low_latency/combine_sum.hpp"
#include "kernels/low_latency/combine_wait.hpp"
#include "kernels/low_latency/peer.hpp"

namespace deep_ep::device::low_latency {

template <bool kLogfmt>
struct CombinePusher {
  const LowLatencyCombineParams& params;
  const CombineWire& wire;
  int group, groups;       ///< in the block
  int warp;                ///< in the group
  std::uint32_t* put_off;  ///< for each row that falls to this warp: has it been put off?
  std::byte* stage;        ///< LogFMT only
  std::uint64_t epoch = 0;

  /// How long rows wait in turn for their owner, in nanoseconds. Where ranks are masked, a late one should cost little;
  /// else the call needs all ranks anyway, and it matters only who is named in the end.
  DEEP_EP_DEVICE std::uint64_t patience() const {
    const LowLatencyParams& common = params.common;
    if (common.mask != nullptr) return 50'000;
    return common.wait.timeout_ns == 0 ? ~std::uint64_t{0} : common.wait.timeout_ns / 4;
  }

  /// `begin(epoch)` meets the block and sets the epoch; what does not depend on it is loaded before.
  template <class Begin>
  DEEP_EP_DEVICE void push_all(Begin begin) {
    CombineRow next = load_row(first_item());
    const std::int32_t most = load_most_rows();
    begin(epoch);
    const int end = warp::max(most) * params.common.num_ranks;
    const std::uint64_t start = now_ns();

    // 1. All rows in turn.
    int waiting = 0;
    for (int index = 0, item = first_item(); item < end; ++index, item += step()) {
      if (index % 32 == 0) set_bits(index, 0);
      const CombineRow row = next;
      next = load_row(item + step());
      if (row.index >= row.rows || left_out(row.source)) continue;
      const Summed summed = push(row, [&](CombineChoice& choice) { return choose_soon(row, start, choice); });
      if (summed != Summed::not_told) continue;
      set_bits(index, put_off[index / 32] | bit(index));
      ++waiting;
    }

    // 2. Again and again those that were put off.
    for (int pass = 1; waiting > 0 && !warp::any(aborted(params.common.wait)); ++pass) {
      pause(pass);
      for (int index = 0, item = first_item(); item < end; ++index, item += step()) {
        if ((put_off[index / 32] & bit(index)) == 0) continue;
        const CombineRow row = load_row(item);
        if (!gives_up(row.source, start)) {
          const auto choose = [&](CombineChoice& choice) { return RowChooser{params, epoch}.choose(row, choice); };
          if (push(row, choose) == Summed::not_told) continue;
        }
        set_bits(index, put_off[index / 32] & ~bit(index));
        --waiting;
      }
    }
  }

 private:
  DEEP_EP_DEVICE RowTable table() const {
    return {const_cast<std::int32_t*>(params.row_table), params.common.num_ranks, params.max_tokens, params.num_topk};
  }

  /// Block by block rather than group by group: with few rows every SM has some.
  DEEP_EP_DEVICE int first_item() const { return group * grid_blocks() + block_index(); }
  DEEP_EP_DEVICE int step() const { return groups * grid_blocks(); }

  /// The most rows that this lane's sources have.
  DEEP_EP_DEVICE std::int32_t load_most_rows() const {
    std::int32_t most = 0;
    for (int source = lane_index(); source < params.common.num_ranks; source += kWarpSize) {
      const std::int32_t rows = load_stream(table().rows(source));
      most = rows > most ? rows : most;
    }
    return most;
  }

  /// Loads what there may be to know of row number `item`, before it is known whether there is such a row.
  DEEP_EP_DEVICE CombineRow load_row(int item) const {
    const int ranks = params.common.num_ranks;
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
  DEEP_EP_DEVICE bool choose_soon(const CombineRow& row, std::uint64_t start, CombineChoice& choice) const {
    for (int spins = 1;; ++spins) {
      if (RowChooser{params, epoch}.choose(row, choice)) return true;
      pause(spins);
      if (spins % 16 != 0) continue;
      if (!warp::any(now_ns() - start < patience()) || warp::any(aborted(params.common.wait))) return false;
    }
  }

  /// Is `source` left out? When its time has run out, it is from now on (or the call ends).
  DEEP_EP_DEVICE bool gives_up(int source, std::uint64_t start) const {
    const LowLatencyParams& common = params.common;
    if (lane_index() == 0 && !masked(common, source) && is_late(common, source, epoch, start)) {
      blame(common, source, Wanted::low_latency_combine_selection, epoch, 0);
    }
    warp::sync();
    return left_out(source);
  }

  /// This warp's share of the row, to its owner.
  template <class Choose>
  DEEP_EP_DEVICE Summed push(const CombineRow& row, Choose choose) const {
    const LowLatencyParams& common = params.common;
    const WarpShare<kLogfmt> share{warp, params.warps_per_row};
    std::byte* to = common.heaps[row.source] +
                    common.window.row_at(LowLatencyKind::combine, epoch, common.rank, row.token, params.row_bytes);
    const RowSummer<kLogfmt> summer{reinterpret_cast<const Vec16*>(params.x), wire, share};
    return summer.sum(row.position, choose, [&](int step, const Vec16& sum) {
      if constexpr (kLogfmt) {
        const PassStage of_pass{wire, stage, share.pass(step)};
        const int vector = share.vector(wire, step);
        if (vector >= 0) *of_pass.vector(vector) = sum;
        if (step % WarpShare<true>::kSteps != WarpShare<true>::kSteps - 1) return;
        of_pass.encode();
        store_pass(of_pass, to);
      } else {
        const LineLane lane;
        const std::uint32_t line = static_cast<std::uint32_t>(share.unit(step) * kWarpLines + lane.line);
        store_line(to + lane.byte_at(line), line_part(sum, epoch), line < wire.lines());
      }
    });
  }

  DEEP_EP_DEVICE void store_pass(const PassStage& of_pass, std::byte* to) const {
    const LineLane lane;
    for (int chunk = of_pass.first_chunk(); chunk < of_pass.end_chunk(); ++chunk) {
      const std::uint32_t lines = wire.lines_of_chunk(chunk, of_pass.encoded(chunk));
      std::byte* begin = to + static_cast<std::size_t>(chunk) * wire.chunk_lines() * kTaggedLine;
      for (std::uint32_t first = 0; first < lines; first += kWarpLines) {
        const std::uint32_t line = first + static_cast<std::uint32_t>(lane.line);
        const bool wanted = line < lines;
        LinePart part{};
        if (wanted) {
          const auto* words = reinterpret_cast<const std::uint64_t*>(of_pass.chunk(chunk) + lane.payload_at(line));
          part = {{words[0], lane.has_tag() ? epoch : words[1]}};
        }
        store_line(begin + lane.byte_at(line), part, wanted);
      }
    }
    warp::sync();  // the stage has been read
  }
};

}  // namespace deep_ep::device::low_latency
