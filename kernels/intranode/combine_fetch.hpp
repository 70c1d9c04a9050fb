// The fetching warp of combine: takes tokens, and for each brings the rows that its destination ranks hold, in rank
// order and a piece (if possible a whole row) at a time, into the ring that the adding warps read.
#pragma once

#include "kernels/intranode/combine_rows.hpp"
#include "kernels/intranode/tickets.hpp"
#include "kernels/primitives/bits.hpp"
#include "kernels/primitives/bulk.hpp"
#include "kernels/primitives/warp.hpp"

namespace deep_ep::device {

struct CombineFetcher {
  CombineRows rows;
  const CombineShared& layout;
  std::byte* memory;
  std::uint32_t filled = 0;  ///< slots so far

  /// Fills the next slot, as soon as the adding warps have emptied it. `from` of lane 0 counts.
  DEEP_EP_DEVICE void fill(const FetchedPiece& piece, const std::byte* from) {
    if (lane_index() == 0) {
      const auto slots = static_cast<std::uint32_t>(layout.slots);
      const std::uint32_t slot = filled % slots;
      if (filled >= slots) mbarrier::wait(layout.empty(memory)[slot], (filled / slots - 1) & 1);
      layout.fetched(memory)[slot] = piece;
      Mbarrier& full = layout.full(memory)[slot];
      if (piece.has_row) {
        mbarrier::arrive_expect_bytes(full, piece.bytes);
        bulk::load(layout.slot(memory, slot), from, piece.bytes, full);
      } else {
        mbarrier::arrive(full);
      }
    }
    ++filled;
  }

  /// Fetches one token. False after a fault.
  DEEP_EP_DEVICE bool fetch(int token) {
    const CombineParams& params = rows.params;
    const std::int32_t first_group_row = rows.row_at(token, lane_index());
    int count = count_bits(warp::ballot(first_group_row >= 0));
    for (int first_rank = kWarpSize; first_rank < params.common.num_ranks; first_rank += kWarpSize) {
      count += count_bits(warp::ballot(rows.row_at(token, first_rank + lane_index()) >= 0));
    }
    for (std::uint32_t offset = 0; offset < params.row_bytes; offset += layout.piece_bytes) {
      const std::uint32_t rest = params.row_bytes - offset;
      FetchedPiece piece{token, offset, rest < layout.piece_bytes ? rest : layout.piece_bytes, true, true, false};
      if (count == 0) fill(piece, nullptr);
      int index = 0;
      for (int first_rank = 0; first_rank < params.common.num_ranks; first_rank += kWarpSize) {
        const int rank = first_rank + lane_index();
        const std::int32_t row = first_rank == 0 ? first_group_row : rows.row_at(token, rank);
        if (offset == 0 && !warp::all(row < 0 || rows.await(token, rank))) return false;
        bulk::fence_global();  // what the flags promise is read by the copy engine
        const std::uint64_t address = row < 0 ? 0 : reinterpret_cast<std::uint64_t>(rows.address(token, rank, row));
        for (std::uint32_t left = warp::ballot(row >= 0); left != 0; left &= left - 1) {
          piece.has_row = true;
          piece.first = index == 0;
          piece.last = ++index == count;
          fill(piece, reinterpret_cast<const std::byte*>(warp::shuffle(address, lowest_bit(left))) + offset);
        }
      }
    }
    return true;
  }

  /// Fetches until no token is left, then tells the adding warps so. False after a fault.
  DEEP_EP_DEVICE bool fetch_all() {
    std::uint32_t* next = &rows.params.common.state->combine_next_token;
    bool good = true;
    for (std::uint32_t token = take_next(next); good && token < static_cast<std::uint32_t>(rows.params.num_tokens);) {
      const std::uint32_t upcoming = ask_next(next);  // the answer comes while we fetch
      good = fetch(static_cast<int>(token));
      token = warp::shuffle(upcoming, 0);
    }
    fill(FetchedPiece{-1, 0, 0, true, true, false}, nullptr);
    return good;
  }
};

}  // namespace deep_ep::device
