// The part of every rank's heap that peers signal in. It starts the heap and has the same layout on every rank, so an
// address on a peer is the peer's heap base plus the offset computed here.
//
// All of it is zero when the buffer is made and never reset: signals only grow. Everything has one writer and one
// reader.
#pragma once

#include <cstdint>

#include "kernels/common/carver.hpp"
#include "kernels/common/messages.hpp"
#include "kernels/primitives/cell.hpp"

namespace deep_ep {

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

/// A rank's word that it has begun a call of the second interface, and what must agree: see kernels/elastic/meet.hpp.
/// Cells, so that no fence is between the message and its signal.
struct alignas(kLine) ElasticArrival {
  static constexpr int kCells = 3;
  Cell cells[kCells];
};

/// Plain signals, one per source and purpose.
enum class IntranodeSignal : int {
  notify,
  selections,  ///< Progress: how many tokens the source has
  dispatch_rows,
  dispatch_credit,
  combine_done,
  combine_credit,
  barrier,
  load_balance_done,
  count
};

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
    combine_boxes_ = carver.place<Mailbox<CombineAddresses>>(2 * ranks);
    arrivals_ = carver.place<ElasticArrival>(3 * ranks);
    load_balance_boxes_ = carver.place<Mailbox<LoadBalanceCall>>(ranks);
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
  /// Of `source`: at a dispatch (slot 0), or at a combine, two in turn like those of notify_slot() (slots 1 and 2).
  DEEP_EP_DEVICE ElasticArrival& elastic_arrival(std::byte* heap, int slot, int source) const {
    return reinterpret_cast<ElasticArrival*>(heap + arrivals_)[slot * num_ranks_ + source];
  }
  /// What `source` tells in call `epoch`, two in turn like those of notify_slot().
  DEEP_EP_DEVICE Mailbox<CombineAddresses>& combine_box(std::byte* heap, std::uint64_t epoch, int source) const {
    const auto index = static_cast<int>(epoch & 1) * num_ranks_ + source;
    return reinterpret_cast<Mailbox<CombineAddresses>*>(heap + combine_boxes_)[index];
  }
  DEEP_EP_DEVICE Mailbox<LoadBalanceCall>& load_balance_box(std::byte* heap, int source) const {
    return reinterpret_cast<Mailbox<LoadBalanceCall>*>(heap + load_balance_boxes_)[source];
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
  std::size_t dispatch_boxes_ = 0, combine_boxes_ = 0, arrivals_ = 0, load_balance_boxes_ = 0, signals_ = 0;
  std::size_t notify_slots_ = 0, notify_slot_bytes_ = 0, pushed_flags_ = 0, bytes_ = 0;
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
