// The part of every rank's heap that peers signal in. It starts the heap and has the same layout on every rank, so an
// address on a peer is the peer's heap base plus the offset computed here.
//
// All of it is zero when the buffer is made and never reset: signals only grow.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/common/limits.hpp"

namespace deep_ep {

/// Words and the signal that says they are there; one writer, one reader.
struct alignas(128) Mailbox {
  std::uint64_t signal;
  std::uint64_t word[15];
};

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
};

/// Offsets of everything in the control region.
struct ControlWindow {
  int num_ranks = 0;
  int max_local_experts = 0;
  int max_window_tokens = 0;  ///< flags of pushed rows: tokens per source that fit the push window at once

  enum class Box : int { dispatch_addresses, combine_addresses, count };
  /// Plain signals, one per source and purpose.
  enum class Signal : int { notify, dispatch_rows, dispatch_credit, combine_done, combine_credit, count };

  DEEP_EP_HOST_DEVICE std::size_t mailboxes_at() const { return 0; }
  DEEP_EP_HOST_DEVICE std::size_t signals_at() const {
    return mailboxes_at() +
           static_cast<std::size_t>(Box::count) * static_cast<std::size_t>(num_ranks) * sizeof(Mailbox);
  }
  DEEP_EP_HOST_DEVICE std::size_t notify_at() const {
    return signals_at() + static_cast<std::size_t>(Signal::count) * static_cast<std::size_t>(num_ranks) * kLine;
  }
  DEEP_EP_HOST_DEVICE std::size_t notify_slot_bytes() const {
    return align_to_line(sizeof(CallShape)) +
           align_to_line(sizeof(std::int32_t) * static_cast<std::size_t>(num_ranks)) +
           align_to_line(sizeof(std::int32_t) * static_cast<std::size_t>(max_local_experts));
  }
  DEEP_EP_HOST_DEVICE std::size_t flags_at() const {
    return notify_at() + 2 * static_cast<std::size_t>(num_ranks) * notify_slot_bytes();
  }
  DEEP_EP_HOST_DEVICE std::size_t bytes() const {
    return align_to_line(flags_at() + sizeof(std::uint64_t) * static_cast<std::size_t>(num_ranks) *
                                          static_cast<std::size_t>(max_window_tokens));
  }

  /// The mailbox that `source` fills in the heap starting at `heap`.
  DEEP_EP_HOST_DEVICE Mailbox* mailbox(std::byte* heap, Box box, int source) const {
    return reinterpret_cast<Mailbox*>(heap + mailboxes_at()) + static_cast<int>(box) * num_ranks + source;
  }
  /// The signal that `source` raises in the heap starting at `heap`. Each has a line of its own.
  DEEP_EP_HOST_DEVICE std::uint64_t* signal(std::byte* heap, Signal kind, int source) const {
    const std::size_t line = static_cast<std::size_t>(static_cast<int>(kind) * num_ranks + source);
    return reinterpret_cast<std::uint64_t*>(heap + signals_at() + line * kLine);
  }
  /// What `source` tells in call `epoch`. Two slots in turn: a peer may be one call ahead, never two.
  DEEP_EP_HOST_DEVICE NotifySlot notify_slot(std::byte* heap, std::uint64_t epoch, int source) const {
    const std::size_t index = (epoch & 1) * static_cast<std::size_t>(num_ranks) + static_cast<std::size_t>(source);
    std::byte* at = heap + notify_at() + index * notify_slot_bytes();
    NotifySlot slot{};
    slot.shape = reinterpret_cast<CallShape*>(at);
    at += align_to_line(sizeof(CallShape));
    slot.tokens_per_rank = reinterpret_cast<std::int32_t*>(at);
    at += align_to_line(sizeof(std::int32_t) * static_cast<std::size_t>(num_ranks));
    slot.tokens_per_expert = reinterpret_cast<std::int32_t*>(at);
    return slot;
  }
  /// Flag of the row that `source` pushed into `slot` of its part of the push window.
  DEEP_EP_HOST_DEVICE std::uint64_t* pushed_flag(std::byte* heap, int source, int slot) const {
    return reinterpret_cast<std::uint64_t*>(heap + flags_at()) +
           static_cast<std::size_t>(source) * static_cast<std::size_t>(max_window_tokens) +
           static_cast<std::size_t>(slot);
  }
};

/// A window that does not hold all tokens at once holds those of so many rounds.
constexpr int kWindowRounds = 4;

/// A call takes at most so many rounds.
constexpr int kMostRounds = (1 << 20) - 1;

/// A signal that counts rounds within a call: grows over calls and rounds alike, and nobody has to remember a base.
/// `round` is the number of finished rounds.
DEEP_EP_HOST_DEVICE constexpr std::uint64_t round_signal(std::uint64_t epoch, std::uint64_t round) {
  return epoch << 20 | round;
}

/// This rank's own counters, in device memory. Zero when the buffer is made.
struct KernelState {
  // Finished calls of each kind. The kernel's last block advances its own, so a graph replay is a new epoch.
  std::uint64_t notify_epoch;
  std::uint64_t dispatch_epoch;
  std::uint64_t combine_epoch;
  // Blocks (or warps) that have arrived; the last to arrive puts zero back.
  std::uint32_t notify_ticket;
  std::uint32_t dispatch_round_ticket;
  std::uint32_t dispatch_drain_ticket;
  std::uint32_t dispatch_ticket;
  std::uint32_t combine_ticket;
  std::uint32_t combine_round_ticket[kWindowRounds];  ///< in turn: as many rounds may be under way at once
  // The next token, or part of one, that a warp may take; zero between calls. SMs differ in speed: sharing tokens out
  // beforehand would make the call as slow as the slowest.
  std::uint32_t dispatch_next_token;
  std::uint32_t combine_next_part;
};

/// What every kernel of the family is told.
struct IntranodeParams {
  int rank = 0;
  int num_ranks = 0;
  std::byte* const* heaps = nullptr;  ///< heap base of every rank as this rank maps it; readable by kernels
  ControlWindow control;
  KernelState* state = nullptr;
};

}  // namespace deep_ep
