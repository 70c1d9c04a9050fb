#include "csrc/buffer/faults.hpp"

#include <algorithm>
#include <array>
#include <cstdint>

#include "csrc/rdma/ring/failure.hpp"
#include "csrc/support/format.hpp"
#include "deep_ep/tensor.hpp"
#include "kernels/common/messages.hpp"
#include "kernels/low_latency/params.hpp"

namespace deep_ep {
namespace {

const char* text_of(Wanted wanted) {
#define DEEP_EP_TEXT(name, text) text,
  constexpr std::array kTexts = {DEEP_EP_WANTED(DEEP_EP_TEXT)};
#undef DEEP_EP_TEXT
  const auto index = static_cast<std::size_t>(wanted);
  return index < kTexts.size() ? kTexts[index] : "an unknown event";
}

constexpr std::array<const char*, CallShape::kWords> kShapeFields = {
    "bytes of a row of x",
    "bytes of a row of x_scales",
    "top-k",
    "bytes of a topk_idx element",
    "number of experts",
    "dtype of x",
    "dtype of x_scales",
    "topk_weights",
};

/// See kAgreedRowsToPeer.
constexpr std::array<const char*, kAgreedRowsToPeer> kRowFields = {
    "bytes of a row of x", "number of scales of a row", "top-k", "maximum of tokens of a rank",
    "kind (1 with weights, plus 2 with one rounding for all rows; of a dispatch 1 with a handle)"};

/// A word of the CallShape as a message should show it.
std::string describe_shape_value(int field, std::uint64_t value) {
  const bool is_dtype = field == 5 || field == 6;
  if (field == 7) return value == 0 ? "not given" : "given";
  return is_dtype ? name_of(static_cast<DType>(value)) : std::to_string(value);
}

/// Low-latency kernels do not note what a word held: that would take registers in every wait.
std::string seen_of(const FaultRecord& fault) {
  const bool noted = fault.wanted < Wanted::low_latency_dispatch_credit || fault.wanted > Wanted::low_latency_barrier;
  return noted ? std::to_string(fault.seen) : std::string("an earlier call");
}

/// Of a fault that is no time-out, without what it means for the buffer.
std::string describe_kind(const FaultRecord& fault, int rank) {
  const auto field = static_cast<std::size_t>(fault.field);
  switch (fault.wanted) {
    case Wanted::low_latency_dispatch_rows:
      return fmt::format(
          "low_latency_dispatch: tokens name local expert {} of rank {} more than once, and it got more than the {} "
          "rows that its part of the output has",
          fault.field, rank, fault.seen);
    case Wanted::low_latency_combine_selection: {
      if (fault.field == 0) {
        return fmt::format(
            "low_latency_combine: ranks {} and {} differ in the dispatch that their handles are of, "
            "max_tokens, hidden, top-k, num_experts or return_recv_hook; they must be equal on all ranks",
            rank, fault.peer);
      }
      // Found out by the expert's rank (1), or by the rank that selects it (2).
      const int selects = fault.field == 1 ? fault.peer : rank;
      const int expert_of = fault.field == 1 ? rank : fault.peer;
      return fmt::format(
          "low_latency_combine: topk_idx of rank {} selects expert {} (rank {}) for token {}, but the dispatch's "
          "topk_idx has another one there; a selection may only become -1",
          selects, fault.expected, expert_of, fault.seen);
    }
    case Wanted::load_balance_call:
      return fmt::format(
          "prefetch_weights or reduce_grads: ranks {} and {} differ in which of the two they call, in the numbers of "
          "slots, experts or tensors, or in where their slots lie; these must be equal on all ranks",
          rank, fault.peer);
    case Wanted::internode_rows:
      if (fault.kind == FaultKind::overflow) {
        return fmt::format(
            "rank {} handed on {} tokens of other nodes but its num_worst_tokens, for each rank of its node, leaves "
            "room for {}; combine lacks the rows of those beyond",
            rank, fault.expected, fault.seen);
      }
      return fmt::format(
          "dispatch or combine between nodes: ranks {} and {} differ in bytes of a row of x, number of scales of a "
          "row, top-k, or in the dispatch that their handles are of; they must be equal on all ranks",
          rank, fault.peer);
    default:
      break;
  }
  if (fault.kind == FaultKind::overflow) {
    return fmt::format("rank {} received {} rows but num_worst_tokens leaves room for {}; the rows beyond are lost",
                       rank, fault.expected, fault.seen);
  }
  if (fault.wanted == Wanted::combine_addresses && fault.field >= kAgreedRowsToPeer) {
    const bool to_peer = fault.field == kAgreedRowsToPeer;
    return fmt::format(
        "combine: rank {} has sent {} rows to rank {} by the handle of rank {}, but {} by the handle of rank {}: the "
        "handles are of different dispatches",
        to_peer ? rank : fault.peer, fault.expected, to_peer ? fault.peer : rank, rank, fault.seen, fault.peer);
  }
  const bool counts = fault.wanted == Wanted::counts;
  const auto value = [&](std::uint64_t of) {
    return counts ? describe_shape_value(fault.field, of) : fmt::to_string(of);
  };
  return fmt::format("{}: {} is {} on rank {} but {} on rank {}; it must be equal on all ranks",
                     fault.wanted == Wanted::combine_addresses ? "combine" : "dispatch",
                     counts ? kShapeFields[field] : kRowFields[field], value(fault.expected), rank, value(fault.seen),
                     fault.peer);
}

constexpr const char* kNoLongerAgree = ". The ranks no longer agree: destroy the buffer";

}  // namespace

std::string describe_mismatch(const FaultRecord& fault, int rank, const std::string& difference) {
  if (!difference.empty()) return difference + kNoLongerAgree;
  return fmt::format(
      "low_latency_dispatch: ranks {} and {} differ in one or more of max_tokens, hidden, top-k, num_experts, "
      "rows' format, return_recv_hook and whether combine_weights are given; all must be equal on all ranks{}",
      rank, fault.peer, kNoLongerAgree);
}

std::string describe_fault(const FaultRecord& fault, int rank, double timeout_s, std::optional<int> lost,
                           const std::string& why) {
  if (fault.kind == FaultKind::rdma_failed) return rdma::describe_fault(rank, fault) + ". Destroy the buffer";
  if (fault.kind != FaultKind::timeout) {
    return describe_kind(fault, rank) + (breaks(fault) ? kNoLongerAgree : "");
  }
  if (fault.wanted == Wanted::low_latency_combine_signal) {
    return fmt::format(
        "low_latency_combine: rank {} waited {} s for its own program to raise element {} of the signals, of local "
        "expert {}, to {}; it is {}{}",
        rank, timeout_s, fault.field, fault.expected >> 32, fault.expected & 0xffffffffu, fault.seen, kNoLongerAgree);
  }
  const int named = lost.value_or(fault.peer);
  const std::string relay = named == fault.peer ? "" : fmt::format(", which rank {} waits for, too,", fault.peer);
  if (!why.empty()) {
    return fmt::format("rank {} waited in vain for rank {}{} without seeing {} (signal at {}, expected {}): {}{}", rank,
                       named, relay, text_of(fault.wanted), seen_of(fault), fault.expected, why, kNoLongerAgree);
  }
  return fmt::format("rank {} waited {} s for rank {}{} without seeing {} (signal at {}, expected {}){}", rank,
                     timeout_s * std::max(fault.field, 1), named, relay, text_of(fault.wanted), seen_of(fault),
                     fault.expected, kNoLongerAgree);
}

std::string describe_given_up(std::span<const control::LostRank> lost, int rank) {
  const auto own = std::ranges::find(lost, rank, &control::LostRank::rank);
  const control::LostRank verdict = own != lost.end() ? *own : control::LostRank{.rank = rank};
  return fmt::format("{}. It comes back with low_latency_resume, which all ranks call",
                     describe_masking(verdict, "its process seems to have ended"));
}

std::string describe_masking(const control::LostRank& lost, const std::string& gone) {
  switch (lost.why) {
    case control::LostWhy::gone:
      return fmt::format("rank {} is masked: {}", lost.rank, gone);
    case control::LostWhy::silent:
      return fmt::format("rank {} is masked: rank {} waited {:.3g} s for it without seeing {}", lost.rank, lost.by,
                         lost.waited_s, text_of(static_cast<Wanted>(lost.wanted)));
    case control::LostWhy::ended:
      return fmt::format("rank {} is masked: it has ended a low-latency call, and its own error says why", lost.rank);
    case control::LostWhy::failed:
      if (lost.by == lost.rank) return fmt::format("rank {} is masked: its own RDMA operations failed", lost.rank);
      return fmt::format("rank {} is masked: RDMA operations of rank {} to it failed", lost.rank, lost.by);
    case control::LostWhy::left:
      return fmt::format("rank {} is masked: it has left the buffer", lost.rank);
    case control::LostWhy::unknown:
      break;
  }
  return fmt::format("rank {} is masked", lost.rank);
}

}  // namespace deep_ep
