// The part of every rank's heap that peers signal in. It starts the heap and has the same layout on every rank, so an
// address on a peer is the peer's heap base plus the offset computed here.
//
// All of it is zero when the buffer is made and never reset: signals only grow. Everything has one writer and one
// reader.
#pragma once

#include <cstdint>

#include "kernels/common/carver.hpp"

namespace deep_ep {

/// A message, and the signal that says to which call it belongs.
template <class Message>
struct alignas(kLine) Mailbox {
  std::uint64_t signal;
  Message message;
};

/// Where a rank wants its rows of a dispatch: offsets in its heap, in its window those of the sender's part.
struct DispatchAddresses {
  std::uint64_t x, scales, topk_idx, topk_weights, src_idx;
  std::int64_t capacity;      ///< rows it has room for in all
  std::uint32_t window_rows;  ///< 0: the addresses are final places. Else rows that the part of the window holds
  // Must agree, even where no counts are exchanged (cached calls).
  std::uint32_t row_bytes;
  std::int32_t num_scales, num_topk;
};

/// Where a rank's rows of a combine are, and where others may put theirs: offsets in its heap.
struct CombineAddresses {
  std::uint64_t x, topk_weights;
  std::uint64_t window;  ///< the reader's part
  std::uint32_t window_stride;
  std::int32_t window_tokens, tokens_per_round;
  std::int32_t num_tokens;
  std::int32_t num_rows;
  bool pulled;  ///< others read its rows at x; else it pushes them into the owners' windows
  // Must agree.
  std::uint32_t row_bytes;
  std::int32_t num_topk;
  std::int32_t rows_to_reader, rows_from_reader;  ///< as the handle has it
};
static_assert(sizeof(Mailbox<DispatchAddresses>) == kLine && sizeof(Mailbox<CombineAddresses>) == kLine);

/// What of these must agree, in the words of a fault record.
enum class RowField : int { row_bytes, num_scales, num_topk, rows_to_peer, rows_from_peer };

/// What must agree between ranks before rows may move.
struct CallShape {
  static constexpr int kWords = 8;
  /// x row bytes, bytes of a row's scales, top-k, bytes of a top-k index (0: none), experts, dtypes of x and of its
  /// scales, version
  std::int64_t word[kWords];
};

/// One source's counts, as notify leaves them at every rank.
struct NotifySlot {
  CallShape* shape;
  std::int32_t* tokens_per_rank;    ///< [num_ranks]: tokens the source sends to each rank
  std::int32_t* tokens_per_expert;  ///< [max_local_experts]: entries naming each expert of the reading rank
  std::size_t bytes;

  DEEP_EP_HOST_DEVICE NotifySlot(Carver carver, int num_ranks, int max_local_experts)
      : shape(carver.take<CallShape>()),
        tokens_per_rank(carver.take<std::int32_t>(static_cast<std::size_t>(num_ranks), kLine)),
        tokens_per_expert(carver.take<std::int32_t>(static_cast<std::size_t>(max_local_experts), kLine)),
        bytes(align_to_line(carver.bytes())) {}
};

/// Plain signals, one per source and purpose.
enum class IntranodeSignal : int { notify, dispatch_rows, dispatch_credit, combine_done, combine_credit, count };

/// Computes addresses in the control window of the heap that begins at `heap`, which peer `source` writes to.
class ControlWindow {
 public:
  ControlWindow() = default;
  /// `max_window_tokens`: tokens of a source that fit the window for pushed rows at once; each has a flag.
  ControlWindow(int num_ranks, int max_local_experts, int max_window_tokens)
      : num_ranks_(num_ranks), max_local_experts_(max_local_experts), max_window_tokens_(max_window_tokens) {
    const auto ranks = static_cast<std::size_t>(num_ranks);
    Carver carver = Carver::without_memory();
    dispatch_boxes_ = carver.place<Mailbox<DispatchAddresses>>(ranks);
    combine_boxes_ = carver.place<Mailbox<CombineAddresses>>(ranks);
    signals_ = carver.place<Line>(static_cast<std::size_t>(IntranodeSignal::count) * ranks);
    notify_slot_bytes_ = NotifySlot(Carver::without_memory(), num_ranks, max_local_experts).bytes;
    notify_slots_ = carver.place<std::byte>(2 * ranks * notify_slot_bytes_, kLine);
    pushed_flags_ = carver.place<std::uint64_t>(ranks * static_cast<std::size_t>(max_window_tokens));
    bytes_ = align_to_line(carver.bytes());
  }

  std::size_t bytes() const { return bytes_; }
  int max_window_tokens() const { return max_window_tokens_; }

  DEEP_EP_DEVICE Mailbox<DispatchAddresses>& dispatch_box(std::byte* heap, int source) const {
    return reinterpret_cast<Mailbox<DispatchAddresses>*>(heap + dispatch_boxes_)[source];
  }
  DEEP_EP_DEVICE Mailbox<CombineAddresses>& combine_box(std::byte* heap, int source) const {
    return reinterpret_cast<Mailbox<CombineAddresses>*>(heap + combine_boxes_)[source];
  }
  DEEP_EP_DEVICE std::uint64_t* signal(std::byte* heap, IntranodeSignal kind, int source) const {
    return &reinterpret_cast<Line*>(heap + signals_)[static_cast<int>(kind) * num_ranks_ + source].signal;
  }
  /// What `source` tells in call `epoch`. Two slots in turn: a peer may be one call ahead, never two.
  DEEP_EP_DEVICE NotifySlot notify_slot(std::byte* heap, std::uint64_t epoch, int source) const {
    const std::size_t index = (epoch & 1) * static_cast<std::size_t>(num_ranks_) + static_cast<std::size_t>(source);
    return {Carver(heap + notify_slots_ + index * notify_slot_bytes_), num_ranks_, max_local_experts_};
  }
  /// Flag of the row that `source` pushed into `slot` of its part of the push window.
  DEEP_EP_DEVICE std::uint64_t* pushed_flag(std::byte* heap, int source, int slot) const {
    return reinterpret_cast<std::uint64_t*>(heap + pushed_flags_) + (std::int64_t{source} * max_window_tokens_ + slot);
  }

 private:
  struct alignas(kLine) Line {
    std::uint64_t signal;
  };

  int num_ranks_ = 0, max_local_experts_ = 0, max_window_tokens_ = 0;
  std::size_t dispatch_boxes_ = 0, combine_boxes_ = 0, signals_ = 0, notify_slots_ = 0, notify_slot_bytes_ = 0;
  std::size_t pushed_flags_ = 0, bytes_ = 0;
};

/// A window that does not hold all tokens at once holds those of this many rounds.
constexpr int kWindowRounds = 4;

/// The most rounds that a call may take.
constexpr int kMostRounds = (1 << 20) - 1;

/// A signal that counts rounds within a call: grows over calls and rounds alike, and nobody has to remember a base.
/// `round` is the number of finished rounds.
DEEP_EP_HOST_DEVICE constexpr std::uint64_t round_signal(std::uint64_t epoch, std::uint64_t round) {
  return epoch << 20 | round;
}

}  // namespace deep_ep
