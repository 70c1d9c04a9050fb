// The part of every rank's heap that low-latency calls write to and signal in: where everything lies.
//
// It has the same layout on every rank. A control part, whose layout depends on nothing that a call brings along, so
// that rows of one call can never be read as signals of another; then rows, in equal parts: of dispatch and of combine,
// for even and for odd epochs, for each source. Within a part, a call lays its rows out by its own row size, always in
// tagged lines (line.hpp), so that tags of all calls lie at the same places.
//
// Everything is written by one source rank (by rails, rails.hpp, by another one in its stead) and read by the rank
// whose heap it is. Signals hold 64-bit epochs; all of them are zero when the buffer is made and never reset.
#pragma once

#include "kernels/common/limits.hpp"
#include "kernels/primitives/cell.hpp"

namespace deep_ep {

/// The two kinds of calls. They count separately and share nothing in the window.
enum class LowLatencyKind : int { dispatch, combine, count };

struct LowLatencyWindow {
  static constexpr std::size_t kBytesPerSlot = 8192;  ///< of the window, for each source: decides the slots
  static constexpr std::size_t kMostTopk = 32;

  std::size_t begin = 0;  ///< offset in the heap
  int num_ranks = 0;
  std::uint32_t slots = 0;       ///< tokens that a rank may send in one call
  std::size_t bytes = 0;         ///< 0: there is no window
  std::size_t source_bytes = 0;  ///< room for the rows of one source in one call

  /// A window of about `bytes` bytes at `begin` of the heap. Where it is too small even for signals, source_bytes is 0.
  static LowLatencyWindow make(std::size_t begin, std::size_t bytes, int num_ranks, int max_local_experts) {
    const auto ranks = static_cast<std::size_t>(num_ranks);
    const std::size_t blocks = 2 * ranks;  // one for each source, for even and for odd epochs
    LowLatencyWindow window;
    window.num_ranks = num_ranks;
    window.bytes = bytes / kLine * kLine;
    window.slots = static_cast<std::uint32_t>(window.bytes / (ranks * kBytesPerSlot));
    window.begin = begin;
    std::size_t at = begin + (static_cast<std::size_t>(LowLatencyKind::count) + 1) * ranks * kLine;
    // Whole lines, so that two sources never write to the same one.
    window.count_bytes_ = align_to_line((1 + (static_cast<std::size_t>(max_local_experts) + 1) / 2) * sizeof(Cell));
    window.counts_ = at;
    at += blocks * window.count_bytes_;
    window.selections_ = at;
    at += blocks * window.slots * kMostTopk * sizeof(Cell);
    window.rows_ = align_to_line(at);
    const std::size_t control = window.rows_ - begin;
    const std::size_t parts = static_cast<std::size_t>(LowLatencyKind::count) * blocks;
    window.source_bytes = control >= window.bytes ? 0 : (window.bytes - control) / parts / kLine * kLine;
    return window;
  }

  // Offsets in the heap of the rank that reads.

  /// One word, by `source`: the last call of the kind whose receive part it has finished.
  DEEP_EP_HOST_DEVICE std::size_t acknowledged_at(LowLatencyKind kind, int source) const {
    return begin + index(static_cast<int>(kind), source) * kLine;
  }
  /// One word, by `source`: the last combine whose send part it has begun. What it waits for shows there.
  DEEP_EP_HOST_DEVICE std::size_t begun_at(LowLatencyKind kind, int source) const {
    return acknowledged_at(kind, source) + sizeof(std::uint64_t);
  }
  /// One word, by `source` that is reached by RDMA: how far its rows of the call have come, see progress_value. Takes
  /// the place of flags, and what is read behind it needs no cells.
  DEEP_EP_HOST_DEVICE std::size_t progress_at(LowLatencyKind kind, std::uint64_t epoch, int source) const {
    return acknowledged_at(kind, source) + (2 + (epoch & 1)) * sizeof(std::uint64_t);
  }
  /// One word, by `source`: how many barriers it has come to.
  DEEP_EP_HOST_DEVICE std::size_t barrier_at(int source) const {
    return begin + index(static_cast<int>(LowLatencyKind::count), source) * kLine;
  }
  /// Cells, by `source`, of a dispatch: the first holds its rows for this rank (CountHead), each further one the
  /// rows of two local experts.
  DEEP_EP_HOST_DEVICE std::size_t counts_at(std::uint64_t epoch, int source) const {
    return counts_ + block(epoch, source) * count_bytes_;
  }
  /// Cells, by owner `source`, of a combine: the selections of its token `slot`, kMostTopk cells a token.
  DEEP_EP_HOST_DEVICE std::size_t selections_at(std::uint64_t epoch, int source, int slot) const {
    return selections_ + slot_of(epoch, source, slot) * kMostTopk * sizeof(Cell);
  }
  /// Row `slot` of `source`, where the call has rows of `row_bytes` (a multiple of kLine). A source has a place of its
  /// own: ranks that disagree in their row sizes do not overwrite each other. (Those that disagree in whether combine
  /// goes by rails may; then each of them also waits for a row that does not come.)
  DEEP_EP_HOST_DEVICE std::size_t row_at(LowLatencyKind kind, std::uint64_t epoch, int source, int slot,
                                         std::size_t row_bytes) const {
    const std::size_t part = index(static_cast<int>(kind) * 2 + static_cast<int>(epoch & 1), source);
    return rows_ + part * source_bytes + static_cast<std::size_t>(slot) * row_bytes;
  }

  // Where the parts begin; use the functions.
  std::size_t counts_ = 0;
  std::size_t count_bytes_ = 0;  ///< of one source
  std::size_t selections_ = 0;
  std::size_t rows_ = 0;

 private:
  DEEP_EP_HOST_DEVICE std::size_t index(int which, int source) const {
    return static_cast<std::size_t>(which * num_ranks + source);
  }
  /// Of the epoch's half, the part that belongs to `source`.
  DEEP_EP_HOST_DEVICE std::size_t block(std::uint64_t epoch, int source) const {
    return index(static_cast<int>(epoch & 1), source);
  }
  DEEP_EP_HOST_DEVICE std::size_t slot_of(std::uint64_t epoch, int source, int slot) const {
    return block(epoch, source) * slots + static_cast<std::size_t>(slot);
  }
};

/// Counters of one kind of call, in this rank's device memory. Zero when the buffer is made. Every block of a kernel
/// reads them at its start; the last block to have done so advances them, so a graph replay is a new epoch.
struct LowLatencyCounters {
  std::uint64_t sent;      ///< calls whose send part has run
  std::uint64_t received;  ///< calls whose receive part has run
  std::uint32_t arrived;   ///< blocks that have read; the last puts zero back
  std::uint32_t finished;  ///< with masking: blocks that have received; the last puts zero back
  /// With masking: sum of what the blocks of this kernel saw as `mask_version`; the last puts zero back.
  std::uint64_t versions;
};

struct LowLatencyState {
  LowLatencyCounters counters[static_cast<int>(LowLatencyKind::count)];
  std::uint64_t barriers;      ///< barriers come to
  std::uint64_t abort;         ///< see WaitContext; of low-latency calls only
  std::uint64_t mask_version;  ///< grows with every rank that a kernel masks
  std::int32_t none, one;      ///< always 0 and 1, for the host to copy from
};

}  // namespace deep_ep
