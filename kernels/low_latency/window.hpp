// The part of every rank's heap that low-latency calls write to and signal in: where everything lies.
//
// It has the same layout on every rank. A control part, whose layout depends on nothing that a call brings along, so
// that rows of one call can never be read as signals of another; then rows, in four equal parts: of dispatch and of
// combine, for even and for odd epochs. Within a part, a call lays its rows out by its own row size.
//
// Everything is written by one source rank and read by the rank whose heap it is. Signals hold 64-bit epochs; all of
// them are zero when the buffer is made and never reset.
#pragma once

#include "kernels/intranode/control_window.hpp"
#include "kernels/primitives/cell.hpp"

namespace deep_ep {

/// The two kinds of calls. They count separately and share nothing in the window.
enum class LowLatencyKind : int { dispatch, combine, count };

struct LowLatencyWindow {
  static constexpr std::size_t kBytesPerSlot = 8192;  ///< of the window, for each source: decides the slots
  static constexpr std::size_t kMostTopk = 32;

  std::size_t begin = 0;  ///< offset in the heap
  std::size_t bytes = 0;  ///< 0: there is none
  int num_ranks = 0;
  int max_local_experts = 0;

  /// Tokens that a rank may send in one call.
  DEEP_EP_HOST_DEVICE std::size_t slots() const {
    return bytes / (static_cast<std::size_t>(num_ranks) * kBytesPerSlot);
  }

  // ---- Control part: offsets in the heap of the rank that reads ----

  /// One word, by `source`: the last call of the kind whose receive part it has finished.
  DEEP_EP_HOST_DEVICE std::size_t acknowledged_at(LowLatencyKind kind, int source) const {
    return begin + line(static_cast<int>(kind), source) * kLine;
  }
  /// One word, by `source`: the last combine whose send part it has begun. What it waits for shows there.
  DEEP_EP_HOST_DEVICE std::size_t begun_at(LowLatencyKind kind, int source) const {
    return acknowledged_at(kind, source) + sizeof(std::uint64_t);
  }
  /// One word, by `source`: how many barriers it has come to.
  DEEP_EP_HOST_DEVICE std::size_t barrier_at(int source) const {
    return begin + line(static_cast<int>(LowLatencyKind::count), source) * kLine;
  }
  /// Cells, by `source`, of a dispatch: the first holds its rows for this rank (see params.hpp), each further one the
  /// rows of two local experts.
  DEEP_EP_HOST_DEVICE std::size_t counts_at(std::uint64_t epoch, int source) const {
    return cells_at() + block(epoch, source) * count_cells() * sizeof(Cell);
  }
  /// Cells, by owner `source`, of a combine: the selections of its token `slot`, kMostTopk cells a token.
  DEEP_EP_HOST_DEVICE std::size_t selections_at(std::uint64_t epoch, int source, int slot) const {
    return selections_begin() +
           (block(epoch, source) * slots() + static_cast<std::size_t>(slot)) * kMostTopk * sizeof(Cell);
  }
  /// One word, by `source`: its row in `slot` is there.
  DEEP_EP_HOST_DEVICE std::size_t flag_at(LowLatencyKind kind, std::uint64_t epoch, int source, int slot) const {
    return flags_begin(kind) +
           (block(epoch, source) * slots() + static_cast<std::size_t>(slot)) * sizeof(std::uint64_t);
  }

  // ---- Rows ----

  /// Row `slot` of `source`, where the call has `max_tokens` rows of `row_bytes` (a multiple of kLine) a source.
  DEEP_EP_HOST_DEVICE std::size_t row_at(LowLatencyKind kind, std::uint64_t epoch, int source, int slot, int max_tokens,
                                         std::size_t row_bytes) const {
    const std::size_t part = static_cast<std::size_t>(kind) * 2 + (epoch & 1);
    const std::size_t row =
        static_cast<std::size_t>(source) * static_cast<std::size_t>(max_tokens) + static_cast<std::size_t>(slot);
    return rows_begin() + part * row_part_bytes() + row * row_bytes;
  }
  /// Room for the rows of one call.
  DEEP_EP_HOST_DEVICE std::size_t row_part_bytes() const {
    const std::size_t control = rows_begin() - begin;
    return control >= bytes ? 0 : (bytes - control) / 4 / kLine * kLine;
  }

 private:
  DEEP_EP_HOST_DEVICE std::size_t line(int which, int source) const {
    return static_cast<std::size_t>(which) * static_cast<std::size_t>(num_ranks) + static_cast<std::size_t>(source);
  }
  /// Of the epoch's half, the part that belongs to `source`.
  DEEP_EP_HOST_DEVICE std::size_t block(std::uint64_t epoch, int source) const {
    return line(static_cast<int>(epoch & 1), source);
  }
  DEEP_EP_HOST_DEVICE std::size_t blocks() const { return 2 * static_cast<std::size_t>(num_ranks); }
  DEEP_EP_HOST_DEVICE std::size_t count_cells() const {
    // Whole lines, so that two sources never write to the same one.
    const std::size_t cells = 1 + (static_cast<std::size_t>(max_local_experts) + 1) / 2;
    return ControlWindow::align(cells * sizeof(Cell)) / sizeof(Cell);
  }
  DEEP_EP_HOST_DEVICE std::size_t cells_at() const {
    return begin + (static_cast<std::size_t>(LowLatencyKind::count) + 1) * static_cast<std::size_t>(num_ranks) * kLine;
  }
  DEEP_EP_HOST_DEVICE std::size_t selections_begin() const {
    return cells_at() + blocks() * count_cells() * sizeof(Cell);
  }
  DEEP_EP_HOST_DEVICE std::size_t flags_begin(LowLatencyKind kind) const {
    const std::size_t of_one = ControlWindow::align(blocks() * slots() * sizeof(std::uint64_t));
    return selections_begin() + blocks() * slots() * kMostTopk * sizeof(Cell) + static_cast<std::size_t>(kind) * of_one;
  }
  DEEP_EP_HOST_DEVICE std::size_t rows_begin() const { return flags_begin(LowLatencyKind::count); }
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
