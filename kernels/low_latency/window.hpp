// Where everything lies in a rank's heap that low-latency calls use: the window, which other ranks write to, and the
// staging memory, which this rank's NIC reads from.
//
// The window has the same layout on every rank: a control part, whose layout does not depend on any call, so that rows
// of one call can never be read as signals of another; then rows, in parts: of dispatch and of combine, for even
// and for odd epochs, for each source. Within a part, a call lays its rows out by its own row size, always in tagged
// lines (line.hpp), so that the tags of all calls lie at the same places.
//
// Everything in it but told() has one writer, its source (by rails another rank in its stead), and one reader, the rank
// whose heap it is. Signals hold 64-bit epochs; all are zero when the buffer is made and never reset. Those that a far
// rank adds to come first. Programs may fill what is behind them with zeros: see of_calls().
#pragma once

#include <algorithm>
#include <cstddef>

#include "kernels/common/carver.hpp"
#include "kernels/common/messages.hpp"
#include "kernels/primitives/cell.hpp"

namespace deep_ep {

/// The two kinds of calls. They count separately and share nothing in the window.
enum class LowLatencyKind : int { dispatch, combine, count };
constexpr std::size_t kLowLatencyKinds = static_cast<std::size_t>(LowLatencyKind::count);

/// To a far rank, a call's rows take so many queue pairs in turn at most: row i lane i modulo the lanes.
constexpr int kMostLowLatencyLanes = 4;

/// What one rank tells another about its calls of one kind, in words that only grow. A far rank adds to them.
struct alignas(kLine) LowLatencyMailbox {
  static constexpr int kAcknowledged = 0;  ///< the last call whose receive part it has finished
  static constexpr int kBarrier = 1;       ///< in the mailbox for dispatch: how many barriers it has come to
  /// Of a far rank: how far its rows of the call have come over a lane, in place of tags and flags; what is read behind
  /// it needs no cells. Of any rank, with masking, over the first lane: it has begun to send the combine. A Progress:
  /// position 0 is what precedes all rows and goes by the first lane; then the row in slot position - 1 (dispatch) or
  /// of token position - 1 (combine) and those before it on its lane.
  DEEP_EP_HOST_DEVICE static constexpr int progress(std::uint64_t epoch, int lane) {
    return 2 + 2 * lane + static_cast<int>(epoch & 1);
  }

  std::uint64_t word[2 + 2 * kMostLowLatencyLanes];
};

/// Memory of calls: for even and for odd epochs so many parts of equal size, each of one source, of one peer ...
template <class T>
struct LowLatencyParts {
  std::uint32_t begin = 0, part_lines = 0;  ///< in lines: kernels have them in half of the registers
  int parts = 0;

  /// So many parts, each of whole lines, so that no two sources write to the same one.
  void carve(Carver& carver, std::size_t count, std::size_t items) {
    part_lines = static_cast<std::uint32_t>(align_to_line(items * sizeof(T)) / kLine);
    parts = static_cast<int>(count);
    begin = static_cast<std::uint32_t>(carver.place<std::byte>(2 * count * part_bytes(), kLine) / kLine);
  }
  std::size_t part_bytes() const { return std::size_t{part_lines} * kLine; }
  /// Item number `item` of a part. A call's rows have a size (a multiple of kTaggedLine) of their own.
  DEEP_EP_HOST_DEVICE Place<T> at(std::uint64_t epoch, int part, int item = 0,
                                  std::size_t item_bytes = sizeof(T)) const {
    return {std::size_t{line_at(epoch, part)} * kLine + static_cast<std::size_t>(item) * item_bytes};
  }
  /// The first line of a part in the heap.
  DEEP_EP_HOST_DEVICE std::uint32_t line_at(std::uint64_t epoch, int part) const {
    return begin + static_cast<std::uint32_t>(static_cast<int>(epoch & 1) * parts + part) * part_lines;
  }
};

struct LowLatencyWindow {
  static constexpr std::size_t kBytesPerSlot = 8192;  ///< of the window, for each source: decides the slots
  static constexpr int kMostWarpsPerRow = 16;         ///< that share a row of combine, or by rails add one

  std::size_t begin = 0;                            ///< offset in the heap
  std::uint32_t slots = 0;                          ///< tokens that a rank may send in one call
  std::size_t bytes = 0;                            ///< 0: there is no window
  std::size_t source_bytes[kLowLatencyKinds] = {};  ///< room for the rows of one source in one call

  // A part for each source.
  LowLatencyParts<Cell> counts;      ///< of a dispatch: a CountHead, then in each cell the rows of two local experts
  LowLatencyParts<Cell> selections;  ///< of a combine, where the source is the owner: [token][selection]
  /// A source has a place of its own: ranks that disagree in their row sizes do not overwrite each other. (Those that
  /// disagree in whether combine goes by rails, or with hooks, may; but then each of them also waits for a row that
  /// does not come, or asks all others before it blames one.)
  LowLatencyParts<std::byte> rows[kLowLatencyKinds];

  // Staging memory, behind the window: what this rank's NIC fetches; and by rails, where rows wait that this rank hands
  // on. The half of a call is written again two calls later. By then every poster of the call in between has seen the
  // completions of what it found posted; and a peer that sends rows to hand on, the only thing that peers write here,
  // has this rank's word that it has finished the call before the last.
  std::size_t staging_bytes = 0;        ///< 0: no rank is far
  LowLatencyParts<Cell> staged_counts;  ///< of dispatch, for each peer
  /// Of combine: this rank's selections, for each block of posters, which gathers them (and serves a peer at least).
  LowLatencyParts<Cell> staged_selections;
  LowLatencyParts<std::byte> staged_rows;  ///< one part for each peer (combine), then one for all (dispatch)
  /// Of the same: kMostWarpsPerRow words of each row, one of each warp that shares it: the epoch, once its part is
  /// staged.
  LowLatencyParts<std::uint64_t> ready;
  /// By rails, rows that this rank hands on, for each node. Dispatch: of the rank on its rail there, which writes them.
  /// Combine: this rank's own parts of the rows of that rank's tokens.
  LowLatencyParts<std::byte> relayed[kLowLatencyKinds];

  /// Bytes per channel: 2 in dispatch; in combine 2 plus the rest of a sum (CombineRowFormat).
  static constexpr std::size_t channel_bytes(LowLatencyKind kind, int rest_bits) {
    return kind == LowLatencyKind::dispatch ? 2 : 2 + static_cast<std::size_t>(rest_bits) / 8;
  }
  /// The sum of both: the unit by which the window is divided.
  static constexpr std::size_t shares(int rest_bits) {
    return channel_bytes(LowLatencyKind::dispatch, rest_bits) + channel_bytes(LowLatencyKind::combine, rest_bits);
  }

  /// A window at `begin` of the heap in which rows have `bytes` bytes.
  static LowLatencyWindow make(std::size_t begin, std::size_t bytes, int num_ranks, int max_local_experts,
                               int rest_bits = 16) {
    const auto ranks = static_cast<std::size_t>(num_ranks);
    LowLatencyWindow window;
    window.begin = begin;
    if (bytes == 0) return window;
    // Kernels number the rows of all ranks by ints, with room to spare: no program has so many.
    const std::size_t most_slots = (std::size_t{1} << 31) / (ranks * ranks) - ranks;
    window.slots = static_cast<std::uint32_t>(std::min(bytes / (ranks * kBytesPerSlot), most_slots));
    Carver carver = Carver::without_memory();
    carver.place<std::byte>(begin);
    window.mailboxes_ = carver.place<LowLatencyMailbox>(2 * kLowLatencyKinds * ranks);
    window.counts.carve(carver, ranks, 1 + (static_cast<std::size_t>(max_local_experts) + 1) / 2);
    window.selections.carve(carver, ranks, std::size_t{window.slots} * kMaxTopk);
    for (std::size_t kind = 0; kind < kLowLatencyKinds; ++kind) {
      const std::size_t share = channel_bytes(static_cast<LowLatencyKind>(kind), rest_bits);
      window.source_bytes[kind] = bytes / (2 * ranks) * share / shares(rest_bits) / kLine * kLine;
      window.rows[kind].carve(carver, ranks, window.source_bytes[kind]);
    }
    window.bytes = window.of_calls().offset - begin + bytes / kLine * kLine;
    return window;
  }

  /// `nodes`: whose rows this rank may hand on; 0: calls never go by rails.
  void add_staging(int nodes) {
    const auto ranks = static_cast<std::size_t>(counts.parts);
    Carver carver = Carver::without_memory();
    carver.place<std::byte>(begin + bytes);
    ready.carve(carver, ranks + 1, std::size_t{slots} * kMostWarpsPerRow);
    staged_counts.carve(carver, ranks, counts.part_bytes() / sizeof(Cell));
    staged_selections.carve(carver, ranks, selections.part_bytes() / sizeof(Cell));
    staged_rows.carve(carver, ranks + 1, std::max(source_bytes[0], source_bytes[1]));
    for (std::size_t kind = 0; kind < kLowLatencyKinds; ++kind) {
      relayed[kind].carve(carver, static_cast<std::size_t>(nodes), source_bytes[kind]);
    }
    staging_bytes = carver.bytes() - begin - bytes;
  }

  /// Only the call under way needs this memory. Zeros stand for nothing there.
  Place<std::byte> of_calls() const { return rows[0].at(0, 0); }
  std::size_t bytes_of_calls() const { return begin + bytes - of_calls().offset; }

  /// A word (see LowLatencyMailbox) by which `source` tells something to the rank whose heap it is.
  DEEP_EP_HOST_DEVICE Place<std::uint64_t> word(LowLatencyKind kind, int source, int index) const {
    const auto mailbox = static_cast<std::size_t>(static_cast<int>(kind) * 2 * counts.parts + source);
    return {mailboxes_ + mailbox * sizeof(LowLatencyMailbox) + static_cast<std::size_t>(index) * sizeof(std::uint64_t)};
  }
  /// What this rank has told a far one by such a word.
  DEEP_EP_HOST_DEVICE Place<std::uint64_t> told(LowLatencyKind kind, int peer, int index) const {
    return word(kind, counts.parts + peer, index);
  }

 private:
  std::size_t mailboxes_ = 0;
};

}  // namespace deep_ep
