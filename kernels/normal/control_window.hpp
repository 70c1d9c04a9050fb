// The part of every rank's heap that peers of its node signal in. It starts the heap and has the same layout on every
// rank, so an address on a peer is the peer's heap base plus the offset computed here.
//
// All of it is zero when the buffer is made and never reset: signals only grow. In a call everything has one writer and
// one reader.
#pragma once

#include <cstdint>

#include "kernels/common/carver.hpp"
#include "kernels/common/messages.hpp"

namespace deep_ep {

/// A source's counts of its tokens for one node: as a rank of that node reads them (its own experts), and as the source
/// stages them for its rail there, where they land (experts of all ranks of the node).
struct SourceCounts {
  CallShape* shape;
  std::int32_t* tokens_for_node;    ///< between nodes
  std::int32_t* tokens_per_rank;    ///< [ranks of the node]
  std::int32_t* tokens_per_expert;  ///< [experts]: entries that name each expert
  std::size_t bytes;

  DEEP_EP_HOST_DEVICE SourceCounts(Carver carver, int width, int experts)
      : shape(carver.take<CallShape>()),
        tokens_for_node(carver.take<std::int32_t>()),
        tokens_per_rank(carver.take<std::int32_t>(static_cast<std::size_t>(width))),
        tokens_per_expert(carver.take<std::int32_t>(static_cast<std::size_t>(experts), kLine)),
        bytes(align_to_line(carver.bytes())) {}
};

/// Plain signals, one per source and purpose.
enum class IntranodeSignal : int { notify, selections, dispatch_rows, combine_done, barrier, load_balance_done, count };

/// Calls at which ranks meet. Each kind has two mailboxes in turn: a source may be one call ahead, never two.
enum class MeetingKind : int { dispatch, combine, load_balance, count };

/// The words of the slots of local rings (LocalRings): for each slot that a rank reads how far the rows stored in it
/// have come, for each slot that it writes how far the rows read from it have.
struct RingWords {
  Place<std::uint64_t> published, released;
  int slots;  ///< that there are words for, for each rank
};

/// Computes addresses in the control window of the heap that begins at `heap`, which peer `source` writes to.
class ControlWindow {
 public:
  ControlWindow() = default;
  /// `width`: ranks of a node. `max_window_tokens`: rows of a source that fit the window for pushed rows at once; each
  /// has a word.
  ControlWindow(int num_ranks, int width, int max_local_experts, int max_window_tokens)
      : num_ranks_(num_ranks),
        width_(width),
        max_local_experts_(max_local_experts),
        max_window_tokens_(max_window_tokens) {
    const auto ranks = static_cast<std::size_t>(num_ranks);
    Carver carver = Carver::without_memory();
    mailboxes_ = carver.place<Mailbox>(2 * static_cast<std::size_t>(MeetingKind::count) * ranks);
    signals_ = carver.place<Line>(static_cast<std::size_t>(IntranodeSignal::count) * ranks);
    counts_bytes_ = counts_at(Carver::without_memory(), 1).bytes;
    counts_ = carver.place<std::byte>(2 * ranks * counts_bytes_, kLine);
    const auto place_words = [&](int slots) {
      const std::size_t words = ranks * static_cast<std::size_t>(slots);
      return RingWords{{carver.place<std::uint64_t>(words, kLine)}, {carver.place<std::uint64_t>(words, kLine)}, slots};
    };
    fetched_rows_ = place_words(kFetchedSlots);
    pushed_rows_ = place_words(max_window_tokens);
    few_selections_ = carver.place<std::byte>(2 * few_selections_bytes(), kLine);
    bytes_ = align_to_line(carver.bytes());
  }

  std::size_t bytes() const { return bytes_; }
  int max_window_tokens() const { return max_window_tokens_; }
  /// Room for what all sources tell of so many selections in a dispatch of the second interface: twice, by the epoch's
  /// parity.
  static constexpr int kFewSelections = 16384;
  std::uint64_t few_selections() const { return few_selections_; }
  static constexpr std::size_t few_selections_bytes() { return kFewSelections * sizeof(std::int32_t); }
  /// Of the local rings of a dispatch, and of a combine.
  const RingWords& fetched_rows() const { return fetched_rows_; }
  const RingWords& pushed_rows() const { return pushed_rows_; }

  DEEP_EP_DEVICE Mailbox& mailbox(std::byte* heap, MeetingKind kind, std::uint64_t epoch, int source) const {
    const int box = 2 * static_cast<int>(kind) + static_cast<int>(epoch & 1);
    return reinterpret_cast<Mailbox*>(heap + mailboxes_)[box * num_ranks_ + source];
  }
  DEEP_EP_DEVICE std::uint64_t* signal(std::byte* heap, IntranodeSignal kind, int source) const {
    return &reinterpret_cast<Line*>(heap + signals_)[static_cast<int>(kind) * num_ranks_ + source].signal;
  }
  /// The counts of `source` in call `epoch`. Two in turn: a source may be one call ahead, never two.
  DEEP_EP_DEVICE SourceCounts counts(std::byte* heap, std::uint64_t epoch, int source) const {
    const std::size_t index = (epoch & 1) * static_cast<std::size_t>(num_ranks_) + static_cast<std::size_t>(source);
    return counts_at(Carver(heap + counts_ + index * counts_bytes_), 1);
  }
  DEEP_EP_HOST_DEVICE SourceCounts counts_at(Carver carver, int ranks) const {
    return {carver, width_, ranks * max_local_experts_};
  }
  DEEP_EP_DEVICE std::uint64_t* pushed_flag(std::byte* heap, int source, int slot) const {
    return pushed_rows_.published.in(heap) + (std::int64_t{source} * max_window_tokens_ + slot);
  }

 private:
  static constexpr int kFetchedSlots = 32;  ///< few bytes are enough under way

  struct alignas(kLine) Line {
    std::uint64_t signal;
  };

  int num_ranks_ = 0, width_ = 0, max_local_experts_ = 0, max_window_tokens_ = 0;
  std::size_t mailboxes_ = 0, signals_ = 0;
  std::size_t counts_ = 0, counts_bytes_ = 0, few_selections_ = 0, bytes_ = 0;
  RingWords fetched_rows_{}, pushed_rows_{};
};

}  // namespace deep_ep
