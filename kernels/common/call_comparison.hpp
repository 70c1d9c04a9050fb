// Do all ranks mean the same dispatch, and does none refuse it?
#pragma once

#include "kernels/common/rows.hpp"

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

/// Compares the call of rank `peer` with this rank's. False after a fault, which every rank meets.
DEEP_EP_DEVICE bool agrees_on_call(const NotifyCall& call, const CallShape& theirs, int peer) {
  const std::int64_t unknown = theirs.word[CallShape::kUnknownExpert];
  if (unknown != 0) {
    report_fault(call.wait, FaultKind::unknown_expert, Wanted::counts, peer, static_cast<int>(unknown >> 32) - 1,
                 static_cast<std::uint64_t>(unknown & 0xffffffff),
                 static_cast<std::uint64_t>(call.shape.word[CallShape::kNumExperts]));
    return false;
  }
  for (int field = 0; field < CallShape::kCompared; ++field) {
    if (theirs.word[field] == call.shape.word[field]) continue;
    report_fault(call.wait, FaultKind::mismatch, Wanted::counts, peer, field,
                 static_cast<std::uint64_t>(call.shape.word[field]), static_cast<std::uint64_t>(theirs.word[field]));
    return false;
  }
  return true;
}

}  // namespace deep_ep::device
