// Where everything lies in a rank's heap that low-latency calls use: the window, which other ranks write to, and the
// staging memory, which this rank's NIC reads from.
//
// The window has the same layout on every rank: a control part, whose layout does not depend on any call, so that rows
// of one call can never be read as signals of another; then rows, in equal parts: of dispatch and of combine, for even
// and for odd epochs, for each source. Within a part, a call lays its rows out by its own row size, always in tagged
// lines (line.hpp), so that the tags of all calls lie at the same places.
//
// Everything in it has one writer, its source (by rails another rank in its stead), and one reader, the rank whose heap
// it is. Signals hold 64-bit epochs; all are zero when the buffer is made and never reset. Those that a far rank adds
// to come first: programs may fill with zeros what is behind them.
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/common/carver.hpp"
#include "kernels/primitives/cell.hpp"

namespace deep_ep {

/// The two kinds of calls. They count separately and share nothing in the window.
enum class LowLatencyKind : int { dispatch, combine, count };
constexpr std::size_t kLowLatencyKinds = static_cast<std::size_t>(LowLatencyKind::count);

/// To a far rank, a call's rows take so many queue pairs in turn at most: row i lane i modulo the lanes.
constexpr int kMostLowLatencyLanes = 4;

/// What one rank tells another about its calls of one kind. Words only grow. A far rank adds to them.
struct alignas(kLine) LowLatencyMailbox {
  std::uint64_t acknowledged;  ///< the last call whose receive part it has finished
  std::uint64_t begun;         ///< with masking: the last combine whose send part it has begun
  /// For each lane, for even and for odd epochs, of a far rank: how far its rows of the call have come over this lane.
  /// Takes the place of tags and flags; what is read behind it needs no cells.
  std::uint64_t progress[kMostLowLatencyLanes][2];
  std::uint64_t barrier;  ///< in the mailbox for dispatch: how many barriers it has come to

  /// `place` 0: what precedes all rows and goes by the first lane; then the row in slot place - 1 (dispatch) or of
  /// token place - 1 (combine) and those before it on its lane. Grows from call to call.
  DEEP_EP_HOST_DEVICE static constexpr std::uint64_t progress_value(std::uint64_t epoch, int place) {
    return epoch << 16 | static_cast<std::uint64_t>(place);
  }
};

/// Parts of equal size, each with room for the rows of one source (or for one rank) in one call.
struct LowLatencyRows {
  std::size_t begin = 0;
  std::size_t part_bytes = 0;

  /// Row `slot` of a part, where the call has rows of `row_bytes` (a multiple of kTaggedLine).
  DEEP_EP_HOST_DEVICE Place<std::byte> row(std::size_t part, int slot, std::size_t row_bytes) const {
    return {begin + part * part_bytes + static_cast<std::size_t>(slot) * row_bytes};
  }
};

struct LowLatencyWindow {
  static constexpr std::size_t kBytesPerSlot = 8192;  ///< of the window, for each source: decides the slots

  std::size_t begin = 0;  ///< offset in the heap
  int num_ranks = 0;
  std::uint32_t slots = 0;       ///< tokens that a rank may send in one call
  std::size_t bytes = 0;         ///< 0: there is no window. A little more than was asked for
  std::size_t source_bytes = 0;  ///< room for the rows of one source in one call
  std::size_t count_bytes = 0;   ///< of one source's counts: whole lines, so that no two sources write to the same one

  /// A window at `begin` of the heap in which calls have `bytes` bytes. Where that is too small even for signals,
  /// source_bytes is 0.
  static LowLatencyWindow make(std::size_t begin, std::size_t bytes, int num_ranks, int max_local_experts) {
    const auto ranks = static_cast<std::size_t>(num_ranks);
    const std::size_t parts = 2 * ranks;  // one for each source, for even and for odd epochs
    LowLatencyWindow window;
    window.begin = begin;
    window.num_ranks = num_ranks;
    if (bytes / kLine == 0) return window;
    // The largest numbers that kernels divide count the rows of all ranks, a few more than there are: see Divisor.
    const std::size_t most_slots = (std::size_t{1} << 31) / (ranks * ranks) - ranks;
    window.slots = static_cast<std::uint32_t>(std::min(bytes / kLine * kLine / (ranks * kBytesPerSlot), most_slots));
    window.count_bytes = align_to_line((1 + (static_cast<std::size_t>(max_local_experts) + 1) / 2) * sizeof(Cell));
    Carver carver = Carver::without_memory();
    carver.place<std::byte>(begin);
    window.mailboxes_ = carver.place<LowLatencyMailbox>(kLowLatencyKinds * ranks);
    window.counts_ = carver.place<std::byte>(parts * window.count_bytes, kLine);
    window.bytes = window.counts_ - begin + bytes / kLine * kLine;
    window.selections_ = carver.place<Cell>(parts * window.slots * kMaxTopk);
    window.rows_.begin = carver.place<std::byte>(0, kLine);
    const std::size_t control = carver.bytes() - begin;
    if (control < window.bytes) {
      window.source_bytes = (window.bytes - control) / (kLowLatencyKinds * parts) / kLine * kLine;
    }
    window.rows_.part_bytes = window.source_bytes;
    return window;
  }

  /// What only the call under way needs. Zeros stand for nothing there.
  Place<std::byte> of_calls() const { return {counts_}; }
  std::size_t bytes_of_calls() const { return begin + bytes - counts_; }

  /// What `source` tells the rank whose heap it is.
  DEEP_EP_HOST_DEVICE Place<LowLatencyMailbox> mailbox(LowLatencyKind kind, int source) const {
    return {mailboxes_ + index(static_cast<int>(kind), source) * sizeof(LowLatencyMailbox)};
  }
  DEEP_EP_HOST_DEVICE Place<std::uint64_t> acknowledged(LowLatencyKind kind, int source) const {
    return {mailbox(kind, source).offset + offsetof(LowLatencyMailbox, acknowledged)};
  }
  DEEP_EP_HOST_DEVICE Place<std::uint64_t> begun(LowLatencyKind kind, int source) const {
    return {mailbox(kind, source).offset + offsetof(LowLatencyMailbox, begun)};
  }
  DEEP_EP_HOST_DEVICE Place<std::uint64_t> progress(LowLatencyKind kind, std::uint64_t epoch, int source,
                                                    int lane) const {
    const std::size_t word = 2 * static_cast<std::size_t>(lane) + (epoch & 1);
    return {mailbox(kind, source).offset + offsetof(LowLatencyMailbox, progress) + word * sizeof(std::uint64_t)};
  }
  DEEP_EP_HOST_DEVICE Place<std::uint64_t> barrier(int source) const {
    return {mailbox(LowLatencyKind::dispatch, source).offset + offsetof(LowLatencyMailbox, barrier)};
  }

  /// Of a dispatch: a CountHead, then in each cell the rows of two local experts.
  DEEP_EP_HOST_DEVICE Place<Cell> counts(std::uint64_t epoch, int source) const {
    return {counts_ + half(epoch, source) * count_bytes};
  }
  /// Of a combine: cells with the selections of owner `source`, [token][selection].
  DEEP_EP_HOST_DEVICE Place<Cell> selections(std::uint64_t epoch, int source) const {
    return {selections_ + half(epoch, source) * slots * kMaxTopk * sizeof(Cell)};
  }
  /// Row `slot` of `source`. A source has a place of its own: ranks that disagree in their row sizes do not overwrite
  /// each other. (Those that disagree in whether combine goes by rails, or with hooks, may; but then each of them also
  /// waits for a row that does not come, or asks all others before it blames one.)
  DEEP_EP_HOST_DEVICE Place<std::byte> row(LowLatencyKind kind, std::uint64_t epoch, int source, int slot,
                                           std::size_t row_bytes) const {
    return rows_.row(index(static_cast<int>(kind) * 2 + static_cast<int>(epoch & 1), source), slot, row_bytes);
  }

 private:
  DEEP_EP_HOST_DEVICE std::size_t index(int which, int source) const {
    return static_cast<std::size_t>(which * num_ranks + source);
  }
  DEEP_EP_HOST_DEVICE std::size_t half(std::uint64_t epoch, int source) const {
    return index(static_cast<int>(epoch & 1), source);
  }

  std::size_t mailboxes_ = 0, counts_ = 0, selections_ = 0;
  LowLatencyRows rows_;
};

/// What this rank's NIC fetches; and by rails, where rows wait that this rank hands on. The half of a call is written
/// again two calls later. By then every poster of the call in between has seen the completions of what it found posted;
/// and a peer that sends rows to hand on, the only thing that peers write here, has this rank's word that it has
/// finished the call before the last.
struct LowLatencyStaging {
  static constexpr std::size_t kMostWarpsPerRow = 16;  ///< that share a row of combine, or by rails add one

  std::size_t begin = 0;  ///< offset in the heap
  std::size_t bytes = 0;

  /// `nodes`: whose rows this rank may hand on; 0: calls never go by rails.
  static LowLatencyStaging make(std::size_t begin, const LowLatencyWindow& window, int nodes) {
    const auto ranks = static_cast<std::size_t>(window.num_ranks);
    LowLatencyStaging staging;
    staging.num_ranks_ = window.num_ranks;
    staging.nodes_ = nodes;
    staging.slots_ = window.slots;
    staging.count_bytes_ = window.count_bytes;
    staging.rows_.part_bytes = staging.relayed_.part_bytes = window.source_bytes;
    staging.begin = begin;
    Carver carver = Carver::without_memory();
    carver.place<std::byte>(begin);
    staging.ready_ = carver.place<std::uint64_t>(2 * (ranks + 1) * window.slots * kMostWarpsPerRow, kLine);
    staging.counts_ = carver.place<std::byte>(2 * ranks * window.count_bytes, kLine);
    staging.selections_ = carver.place<std::byte>(2 * ranks * staging.selection_bytes(), kLine);
    staging.rows_.begin = carver.place<std::byte>(2 * (1 + ranks) * window.source_bytes, kLine);
    staging.relayed_.begin =
        carver.place<std::byte>(2 * kLowLatencyKinds * static_cast<std::size_t>(nodes) * window.source_bytes, kLine);
    staging.bytes = carver.bytes() - begin;
    return staging;
  }

  /// Row number `row` of combine for rank `to`; or of dispatch for all peers, where `to` is the number of ranks.
  DEEP_EP_HOST_DEVICE Place<std::byte> row(std::uint64_t epoch, int to, int row, std::size_t row_bytes) const {
    return rows_.row(part(epoch, to), row, row_bytes);
  }
  /// A word of each warp that shares such a row: the epoch, once its part is staged.
  DEEP_EP_HOST_DEVICE Place<std::uint64_t> ready(std::uint64_t epoch, int to, int row, int warp) const {
    const std::size_t first = (part(epoch, to) * slots_ + static_cast<std::size_t>(row)) * kMostWarpsPerRow;
    return {ready_ + (first + static_cast<std::size_t>(warp)) * sizeof(std::uint64_t)};
  }
  /// Of dispatch, for `peer`.
  DEEP_EP_HOST_DEVICE Place<Cell> counts(std::uint64_t epoch, int peer) const {
    return {counts_ + of_peer(epoch, peer) * count_bytes_};
  }
  /// Of combine: this rank's selections as one block of posters has gathered them, in cells as in the window.
  DEEP_EP_HOST_DEVICE Place<Cell> selections(std::uint64_t epoch, int block) const {
    return {selections_ + of_peer(epoch, block) * selection_bytes()};  // each block serves a peer at least
  }
  /// By rails, rows that this rank hands on. Dispatch: row `slot` of the rank on its rail in `node`, which writes it.
  /// Combine: this rank's own part of the row of token `slot` of that rank.
  DEEP_EP_HOST_DEVICE Place<std::byte> relayed_row(LowLatencyKind kind, std::uint64_t epoch, int node, int slot,
                                                   std::size_t row_bytes) const {
    const int half = static_cast<int>(kind) * 2 + static_cast<int>(epoch & 1);
    return relayed_.row(static_cast<std::size_t>(half * nodes_ + node), slot, row_bytes);
  }

 private:
  DEEP_EP_HOST_DEVICE std::size_t selection_bytes() const { return slots_ * kMaxTopk * sizeof(Cell); }
  DEEP_EP_HOST_DEVICE std::size_t of_peer(std::uint64_t epoch, int peer) const {
    return (epoch & 1) * static_cast<std::size_t>(num_ranks_) + static_cast<std::size_t>(peer);
  }
  /// One for each peer (combine), then one for all (dispatch).
  DEEP_EP_HOST_DEVICE std::size_t part(std::uint64_t epoch, int which) const {
    return (epoch & 1) * static_cast<std::size_t>(num_ranks_ + 1) + static_cast<std::size_t>(which);
  }

  int num_ranks_ = 0, nodes_ = 0;
  std::uint32_t slots_ = 0;
  std::size_t count_bytes_ = 0, ready_ = 0, counts_ = 0, selections_ = 0;
  LowLatencyRows rows_, relayed_;
};

}  // namespace deep_ep
