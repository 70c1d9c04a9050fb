// From a kernel's fault record to an exception.
#include <array>

#include "csrc/buffer/implementation.hpp"
#include "csrc/rdma/ring/failure.hpp"
#include "csrc/support/format.hpp"

namespace deep_ep {
namespace {

const char* text_of(Wanted wanted) {
  switch (wanted) {
    case Wanted::nothing:
      return "nothing";
    case Wanted::counts:
      return "its token counts (dispatch, notify kernel)";
    case Wanted::dispatch_addresses:
      return "where it wants its rows (dispatch kernel)";
    case Wanted::dispatch_rows:
      return "its rows (dispatch kernel)";
    case Wanted::dispatch_credit:
      return "room in its window (dispatch kernel)";
    case Wanted::combine_addresses:
      return "where its rows are (combine kernel)";
    case Wanted::combine_rows:
      return "a pushed row (combine kernel)";
    case Wanted::combine_credit:
      return "room in its window (combine kernel)";
    case Wanted::combine_done:
      return "its word that it has read our rows (combine kernel)";
    case Wanted::low_latency_dispatch_credit:
      return "its word that it has received the dispatch before the last (low-latency dispatch)";
    case Wanted::low_latency_dispatch_counts:
      return "its counts (low-latency dispatch)";
    case Wanted::low_latency_dispatch_rows:
      return "a row (low-latency dispatch)";
    case Wanted::low_latency_combine_credit:
      return "its word that it has received the combine before the last (low-latency combine)";
    case Wanted::low_latency_combine_selection:
      return "the selections of a token (low-latency combine)";
    case Wanted::low_latency_combine_rows:
      return "a row (low-latency combine)";
    case Wanted::low_latency_barrier:
      return "its coming to the barrier (low_latency_clean)";
    case Wanted::rdma_completion:
      return "the NIC's word that RDMA operations have reached it";
  }
  return "an unknown event";
}

constexpr std::array<const char*, CallShape::kWords> kShapeFields = {
    "bytes of a row of x",         "bytes of a row of x_scales", "top-k",
    "bytes of a topk_idx element", "number of experts",          "dtype of x",
    "dtype of x_scales",           "protocol version",
};

/// A word of the CallShape as a message should show it.
std::string describe_shape_value(int field, std::uint64_t value) {
  const bool is_dtype = field == 5 || field == 6;
  return is_dtype ? name_of(static_cast<DType>(value)) : std::to_string(value);
}

}  // namespace

std::string Buffer::Implementation::describe(const FaultRecord& fault) const {
  switch (fault.kind) {
    case FaultKind::timeout:
      return fmt::format(
          "rank {} waited {} s for rank {}: {} did not come (signal at {}, expected {}). The ranks no longer agree: "
          "destroy the buffer",
          rank_, timeout_s_, fault.peer, text_of(fault.wanted), fault.seen, fault.expected);
    case FaultKind::mismatch:
      if (fault.wanted == Wanted::counts) {
        return fmt::format("dispatch: {} is {} on rank {} but {} on rank {}; it must be equal on all ranks",
                           kShapeFields[static_cast<std::size_t>(fault.field)],
                           describe_shape_value(fault.field, fault.expected), rank_,
                           describe_shape_value(fault.field, fault.seen), fault.peer);
      }
      if (fault.wanted == Wanted::low_latency_dispatch_counts) {
        return fmt::format(
            "low_latency_dispatch: ranks {} and {} differ in max_tokens, hidden, top-k, num_experts, use_fp8, in "
            "whether weights travel or, between nodes, in return_recv_hook; they must be equal on all ranks. The ranks "
            "no longer agree: destroy the buffer",
            rank_, fault.peer);
      }
      if (fault.wanted == Wanted::low_latency_combine_selection) {
        return fmt::format(
            "low_latency_combine: ranks {} and {} differ in max_tokens, hidden, top-k, num_experts, use_logfmt "
            "or, between nodes, in return_recv_hook; they must be equal on all ranks. The ranks no longer agree: "
            "destroy the buffer",
            rank_, fault.peer);
      }
      return fmt::format(
          "{}: rows of rank {} and of rank {} differ in size, number of scales or top-k; they must be equal on all "
          "ranks. The ranks no longer agree: destroy the buffer",
          fault.wanted == Wanted::dispatch_addresses ? "dispatch" : "combine", rank_, fault.peer);
    case FaultKind::inconsistent_counts:
      return fmt::format(
          "num_tokens_per_rank of rank {} disagrees with its is_token_in_rank for destination rank {}; both must count "
          "the same tokens",
          fault.peer, fault.field);
    case FaultKind::overflow:
      if (fault.wanted == Wanted::low_latency_dispatch_rows) {
        return fmt::format(
            "low_latency_dispatch: tokens name local expert {} of rank {} more than once, and it got more than the {} "
            "rows that its part of the output has; the rows beyond are lost",
            fault.field, rank_, fault.seen);
      }
      return fmt::format("rank {} received {} rows but num_worst_tokens leaves room for {}; the rows beyond are lost",
                         rank_, fault.expected, fault.seen);
    case FaultKind::unknown_expert:
      return fmt::format("topk_idx of token {} names expert {}, allowed: 0 to {}, or negative for no selection",
                         fault.field, fault.expected, fault.seen - 1);
    case FaultKind::rdma_failed:
      return rdma::describe_fault(rank_, fault) + ". Destroy the buffer";
    case FaultKind::none:
      break;
  }
  return "unknown fault";
}

std::string Buffer::Implementation::describe_masked(const FaultRecord& record) const {
  if (record.kind == FaultKind::rdma_failed) {
    return fmt::format("{}; rank {} is masked now", rdma::describe_fault(rank_, record), record.peer);
  }
  // In combine a rank that has begun the call is given half of that.
  return fmt::format(
      "rank {} waited for rank {} (at most {} s): {} did not come (signal at {}, expected {}); it is masked now", rank_,
      record.peer, timeout_s_, text_of(record.wanted), record.seen, record.expected);
}

bool Buffer::Implementation::breaks(const FaultRecord& fault) {
  // Counts are compared before any row moves, and by all ranks.
  return fault.kind == FaultKind::timeout || fault.kind == FaultKind::rdma_failed ||
         (fault.kind == FaultKind::mismatch && fault.wanted != Wanted::counts);
}

void Buffer::Implementation::break_down(const std::string& why) {
  broken_ = why;
  throw TimeoutError(why);
}

bool Buffer::Implementation::met_fault() const { return __atomic_load_n(&faults_[0].written, __ATOMIC_ACQUIRE) != 0; }

void Buffer::Implementation::raise_faults() {
  if (!broken_.empty() && broken_by_rdma_) throw SystemError(broken_);
  if (!broken_.empty()) throw TimeoutError(broken_);
  if (met_fault()) {
    settle();  // other threads of the kernels may still want to write the record, or look at the abort word
    const FaultRecord fault = faults_[0];
    const std::string text = describe(fault);
    if (fault.kind == FaultKind::timeout) break_down(text);
    if (breaks(fault)) {
      broken_ = text;
      broken_by_rdma_ = fault.kind == FaultKind::rdma_failed;
      if (broken_by_rdma_) throw SystemError(text);
      throw RankMismatch(text);
    }
    executor_->fill(&state_->abort, 0, sizeof state_->abort, comm_stream_);
    executor_->synchronize(comm_stream_);
    faults_[0] = FaultRecord{};
    throw RankMismatch(text);
  }
  if (__atomic_load_n(&faults_[1].written, __ATOMIC_ACQUIRE) == 0) return;
  settle();  // a kernel may be about to write another note
  const FaultRecord note = faults_[1];
  faults_[1] = FaultRecord{};
  if (note.kind == FaultKind::overflow) throw OutOfMemory(describe(note));
  throw InvalidArgument(describe(note));
}

}  // namespace deep_ep
