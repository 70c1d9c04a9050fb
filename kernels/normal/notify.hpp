// Notify, inside a node and between nodes: what does not depend on the way that counts take.
//
// Rows lie in a receiver's output by source rank, then by token index at the source. So the place of token t at rank d
// is: the rows that d gets from the ranks before this one, plus this rank's tokens before t that also go to d. The
// first number comes from the other ranks' counts, the second from a scan of the membership.
#pragma once

#include "kernels/common/numbering.hpp"
#include "kernels/common/rows.hpp"
#include "kernels/common/tickets.hpp"
#include "kernels/common/wait.hpp"
#include "kernels/primitives/block.hpp"
#include "kernels/primitives/thread.hpp"

namespace deep_ep::device {

/// By one thread: what this rank tells the others in CallShape::kUnknownExpert. A layout before this call in stream
/// order has left the note, and the host does not raise it before the call: it would leave the others waiting.
DEEP_EP_DEVICE std::int64_t unknown_expert_to_tell(const NotifyCall& call) {
  if (!call.refuse_unknown_experts) return 0;
  const FaultRecord& note = call.wait.fault[1];
  if (load_acquire<Scope::system>(&note.written) == 0 || note.kind != FaultKind::unknown_expert) return 0;
  constexpr std::uint64_t kMost = 0xffffffffu;
  const std::uint64_t expert = note.expected < kMost ? note.expected : kMost;
  return (std::int64_t{note.field} + 1) << 32 | static_cast<std::int64_t>(expert);
}

/// In which word does the call of another rank differ from this rank's, though it must not? -1: in none.
DEEP_EP_DEVICE int differing_word(const NotifyCall& call, const CallShape& theirs) {
  for (int word = 0; word < CallShape::kCompared; ++word) {
    if (theirs.word[word] != call.shape.word[word]) return word;
  }
  return -1;
}

/// Compares the call of rank `peer` with this rank's. False after a fault, which every rank meets. Every block of the
/// kernel has begun by then: one that begins after a fault takes no part, and ranks would no longer be in step.
DEEP_EP_DEVICE bool agrees_on_call(const NotifyCall& call, const CallShape& theirs, int peer) {
  const std::int64_t unknown = theirs.word[CallShape::kUnknownExpert];
  if (unknown != 0) {
    report_fault(call.wait, FaultKind::unknown_expert, Wanted::counts, peer, static_cast<int>(unknown >> 32) - 1,
                 static_cast<std::uint64_t>(unknown & 0xffffffff),
                 static_cast<std::uint64_t>(call.shape.word[CallShape::kNumExperts]));
    return false;
  }
  const int word = differing_word(call, theirs);
  if (word < 0) return true;
  report_fault(call.wait, FaultKind::mismatch, Wanted::counts, peer, word,
               static_cast<std::uint64_t>(call.shape.word[word]), static_cast<std::uint64_t>(theirs.word[word]));
  return false;
}

/// By a whole block: numbers this rank's tokens for rank `destination`, in their order. Returns how many there are; -1
/// if the caller has counted otherwise, which travels in place of the count, so that all ranks know.
DEEP_EP_DEVICE std::int32_t number_for_rank(const NotifyCall& call, int num_ranks, int destination, Numbering& shared) {
  const auto at = [&](int token) { return std::int64_t{token} * num_ranks + destination; };
  const int count = number_members(
      call.num_tokens, shared,
      [&](int token) { return token < call.num_tokens && call.is_token_in_rank[at(token)] != 0; },
      [&](int token, int number) { call.destination_row[at(token)] = number; });
  return count == call.num_tokens_per_rank[destination] ? count : -1;
}

/// The counts of all ranks, once they are here. `counts_of(source)` has the source's `shape`, its `tokens_per_rank`,
/// and its `tokens_per_expert` for this rank's experts.
template <class CountsOf>
struct AllCounts {
  const NotifyCall& call;
  int rank, num_ranks;
  CountsOf counts_of;

  /// By a whole block: adds the rows of the ranks before this one. Each thread meets the tokens that it numbered
  /// itself.
  DEEP_EP_DEVICE void add_rows_before(int destination) const {
    std::int32_t first_row = 0;
    for (int source = 0; source < rank; ++source) first_row += counts_of(source).tokens_per_rank[destination];
    if (first_row == 0) return;
    constexpr int kTogether = 8;  // loads under way at once
    for (int first = thread_index(); first < call.num_tokens; first += kTogether * block_threads()) {
      std::int32_t* const rows = call.destination_row + destination;
      const auto at = [&](int i) { return std::int64_t{first + i * block_threads()} * num_ranks; };
      std::int32_t row[kTogether];
      for (int i = 0; i < kTogether; ++i) row[i] = first + i * block_threads() < call.num_tokens ? rows[at(i)] : -1;
      for (int i = 0; i < kTogether; ++i) {
        if (row[i] >= 0) rows[at(i)] = row[i] + first_row;
      }
    }
  }

  /// Do all ranks mean the same call, and do their counts make sense? A fault, seen by every rank, if not. Each thread
  /// answers for some ranks.
  DEEP_EP_DEVICE bool agree() const {
    bool good = true;
    for (int source = thread_index(); source < num_ranks; source += block_threads()) {
      const auto counts = counts_of(source);
      good = agrees_on_call(call, *counts.shape, source) && good;
      for (int to = 0; to < num_ranks; ++to) {
        if (counts.tokens_per_rank[to] >= 0) continue;
        report_fault(call.wait, FaultKind::inconsistent_counts, Wanted::counts, source, to, 0, 0);
        good = false;
        break;
      }
    }
    return good;
  }

  /// By one block: writes the tables that outlive the call, and wakes the host. `write_more()` writes what a family has
  /// beside them.
  template <class WriteMore>
  DEEP_EP_DEVICE void finish(std::uint64_t epoch, std::int32_t* scratch, WriteMore write_more) const {
    if (whole_block(agree(), scratch)) {
      write_tables();
      write_more();
    }
    block::sync();
    if (thread_index() == 0 && call.host_counts != nullptr) {
      store_release<Scope::system>(&call.host_counts->epoch, epoch);
    }
  }

 private:
  DEEP_EP_DEVICE void write_tables() const {
    for (int to = thread_index(); to < num_ranks; to += block_threads()) {
      std::int32_t end = 0;
      for (int source = 0; source < num_ranks; ++source) {
        end += counts_of(source).tokens_per_rank[to];
        call.rank_prefix_matrix[source * num_ranks + to] = end;
      }
      if (to == rank && call.host_counts != nullptr) call.host_counts->num_recv_tokens = end;
    }
    if (call.host_counts == nullptr) return;
    for (int expert = thread_index(); expert < call.num_local_experts; expert += block_threads()) {
      std::int32_t count = 0;
      for (int source = 0; source < num_ranks; ++source) count += counts_of(source).tokens_per_expert[expert];
      const std::int32_t alignment = call.expert_alignment;
      call.host_counts->tokens_per_expert[expert] = (count + alignment - 1) / alignment * alignment;
    }
  }
};

}  // namespace deep_ep::device
