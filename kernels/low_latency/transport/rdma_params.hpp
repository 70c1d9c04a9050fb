// What low-latency kernels know of ranks that are reached by RDMA: queue pairs, what these ranks have been told, and
// where rows lie that a NIC is to fetch. Plain data: host code fills it, kernels read it.
#pragma once

#include <cstdint>

#include "kernels/common/faults.hpp"
#include "kernels/low_latency/window.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep {

/// A rank has a queue pair for each peer and channel, so that no two kernels that may run at once share one.
enum class LowLatencyChannel : int { dispatch, combine, barrier, count };

/// What one rank reached by RDMA has been told: the values of the words in its window that this rank adds to, once all
/// that was posted has arrived. Words only grow, so the difference is what is posted; calls that were skipped while the
/// rank was masked make it larger, no more.
struct LowLatencyTold {
  static constexpr int kKinds = static_cast<int>(LowLatencyKind::count);
  std::uint64_t progress[kKinds][2];  ///< for even and for odd epochs
  std::uint64_t acknowledged[kKinds];
  std::uint64_t begun;
  std::uint64_t barrier;
  std::uint64_t stopped;  ///< with masking: the abort word of waits for the rank's queue pairs, see LowLatencyPoster
};

/// The part of this rank's heap that NICs read from; and by rails, where rows wait that this rank hands on. Like the
/// window, all of it is double: the half of a call is written again two calls later. By then every poster of the call
/// between has seen the completions of what it found posted; and a peer that sends rows to hand on, the only thing that
/// peers write here, has this rank's word that it has finished the call before the last.
struct LowLatencyStaging {
  static constexpr std::size_t kMostWarpsPerRow = 16;   ///< that share a row of combine, or by rails add one
  static constexpr std::size_t kLeastCombineWarps = 2;  ///< of a block

  std::size_t begin = 0;  ///< offset in the heap
  std::size_t bytes = 0;

  /// `nodes`: whose rows this rank may hand on, see rails.hpp; 0: calls never go by rails.
  static LowLatencyStaging make(std::size_t begin, const LowLatencyWindow& window, int nodes) {
    const auto ranks = static_cast<std::size_t>(window.num_ranks);
    LowLatencyStaging staging;
    staging.num_ranks_ = window.num_ranks;
    staging.nodes_ = nodes;
    staging.slots_ = window.slots;
    staging.count_bytes_ = window.count_bytes_;
    staging.source_bytes_ = window.source_bytes;
    staging.begin = begin;
    std::size_t at = begin;
    const auto take = [&at](std::size_t bytes) {
      const std::size_t place = at;
      at += align_to_line(bytes);
      return place;
    };
    staging.dispatch_ready_ = take(2 * window.slots * sizeof(std::uint64_t));
    staging.combine_ready_ = take(2 * ranks * window.slots * kMostWarpsPerRow * sizeof(std::uint64_t));
    staging.counts_ = take(2 * ranks * window.count_bytes_);
    staging.selections_ = take(2 * staging.poster_blocks() * staging.block_selection_bytes());
    staging.rows_ = take(2 * (1 + ranks) * window.source_bytes);
    staging.relayed_ = take(2 * static_cast<std::size_t>(LowLatencyKind::count) * static_cast<std::size_t>(nodes) *
                            window.source_bytes);
    staging.bytes = at - begin;
    return staging;
  }

  // Offsets in this rank's heap.

  /// A row of dispatch: the same for all peers.
  DEEP_EP_HOST_DEVICE std::size_t dispatch_row_at(std::uint64_t epoch, int token, std::size_t row_bytes) const {
    return rows_ + part(epoch, num_ranks_) * source_bytes_ + static_cast<std::size_t>(token) * row_bytes;
  }
  /// Row number `row` of combine for `owner`.
  DEEP_EP_HOST_DEVICE std::size_t combine_row_at(std::uint64_t epoch, int owner, int row, std::size_t row_bytes) const {
    return rows_ + part(epoch, owner) * source_bytes_ + static_cast<std::size_t>(row) * row_bytes;
  }
  /// One word: dispatch's row of the token is staged. Holds the epoch.
  DEEP_EP_HOST_DEVICE std::size_t dispatch_ready_at(std::uint64_t epoch, int token) const {
    return dispatch_ready_ + ((epoch & 1) * slots_ + static_cast<std::size_t>(token)) * sizeof(std::uint64_t);
  }
  /// A word of each warp that shares combine's row for `owner`: its part is staged (the epoch), or there is no such row
  /// (no_row_flag).
  DEEP_EP_HOST_DEVICE std::size_t combine_ready_at(std::uint64_t epoch, int owner, int row, int warp) const {
    const std::size_t row_at = (of_peer(epoch, owner) * slots_ + static_cast<std::size_t>(row)) * kMostWarpsPerRow;
    return combine_ready_ + (row_at + static_cast<std::size_t>(warp)) * sizeof(std::uint64_t);
  }
  /// The cells of dispatch's counts for `peer`.
  DEEP_EP_HOST_DEVICE std::size_t counts_at(std::uint64_t epoch, int peer) const {
    return counts_ + of_peer(epoch, peer) * count_bytes_;
  }
  /// Combine's selections, see FarSelections, as one block of posters has gathered them.
  DEEP_EP_HOST_DEVICE std::size_t selections_at(std::uint64_t epoch, int block) const {
    const std::size_t of_block = (epoch & 1) * poster_blocks() + static_cast<std::size_t>(block);
    return selections_ + of_block * block_selection_bytes();
  }
  /// By rails, rows that this rank hands on. Dispatch: row `slot` of the rank on its rail in `node`, which writes it.
  /// Combine: this rank's own part of the row of token `slot` of that rank.
  DEEP_EP_HOST_DEVICE std::size_t relayed_row_at(LowLatencyKind kind, std::uint64_t epoch, int node, int slot,
                                                 std::size_t row_bytes) const {
    const int half = static_cast<int>(kind) * 2 + static_cast<int>(epoch & 1);
    const auto part = static_cast<std::size_t>(half * nodes_ + node);
    return relayed_ + part * source_bytes_ + static_cast<std::size_t>(slot) * row_bytes;
  }

 private:
  DEEP_EP_HOST_DEVICE std::size_t block_selection_bytes() const {
    return kLine + slots_ * LowLatencyWindow::kMostTopk * sizeof(std::uint64_t);
  }
  /// Of combine, at most: a warp serves a rank.
  DEEP_EP_HOST_DEVICE std::size_t poster_blocks() const {
    return (static_cast<std::size_t>(num_ranks_) + kLeastCombineWarps - 1) / kLeastCombineWarps;
  }
  DEEP_EP_HOST_DEVICE std::size_t of_peer(std::uint64_t epoch, int peer) const {
    return (epoch & 1) * static_cast<std::size_t>(num_ranks_) + static_cast<std::size_t>(peer);
  }
  /// Of the rows: one for each peer (combine), then one for all (dispatch).
  DEEP_EP_HOST_DEVICE std::size_t part(std::uint64_t epoch, int which) const {
    return (epoch & 1) * static_cast<std::size_t>(num_ranks_ + 1) + static_cast<std::size_t>(which);
  }

  int num_ranks_ = 0, nodes_ = 0;
  std::uint32_t slots_ = 0;
  std::size_t count_bytes_ = 0, source_bytes_ = 0;
  std::size_t dispatch_ready_ = 0, combine_ready_ = 0, counts_ = 0, selections_ = 0, rows_ = 0, relayed_ = 0;
};

/// In shared memory, one for each warp that posts: what every entry needs.
struct alignas(16) LowLatencyPosterWords {
  RdmaPeerParams pair;  ///< a copy
  WaitContext wait;     ///< for completions
};

/// A word that says how far a source's rows of one call have come: `place` 0 for what precedes all rows, then for the
/// row in slot place - 1 (dispatch) or of token place - 1 (combine) and all before it. Grows from call to call.
DEEP_EP_HOST_DEVICE constexpr std::uint64_t progress_value(std::uint64_t epoch, int place) {
  return epoch << 16 | static_cast<std::uint64_t>(place);
}

/// Where the epoch would say that a row of combine is staged: there is none, as none of its selections is left.
DEEP_EP_HOST_DEVICE constexpr std::uint64_t no_row_flag(std::uint64_t epoch) { return epoch | std::uint64_t{1} << 63; }

/// Combine's selections as they travel by RDMA: 64-bit words, first one for the call, then [token][k] as in cells.
struct FarSelections {
  const std::uint64_t* words;

  DEEP_EP_HOST_DEVICE static std::uint64_t head(int num_tokens, std::uint32_t call_shape) {
    return std::uint64_t{call_shape} << 32 | static_cast<std::uint32_t>(num_tokens);
  }
  DEEP_EP_HOST_DEVICE static std::uint32_t bytes(int num_tokens, int num_topk) {
    return (1 + static_cast<std::uint32_t>(num_tokens * num_topk)) * sizeof(std::uint64_t);
  }
  DEEP_EP_HOST_DEVICE const std::uint64_t* selection(int token, int num_topk, int k) const {
    return words + 1 + token * num_topk + k;
  }
};

struct LowLatencyRdma {
  const RdmaPeerParams* peers = nullptr;  ///< [channel][num_ranks]; nullptr: no rank is reached by RDMA
  LowLatencyTold* told = nullptr;         ///< [num_ranks], device memory
  LowLatencyStaging staging;
  std::uint32_t far[(kMaxRanks + 31) / 32] = {};  ///< a bit for each rank that is reached by RDMA
  int rail_width = 0;  ///< ranks of a node, where rows of this call go by rails (rails.hpp); else 0
};

}  // namespace deep_ep
