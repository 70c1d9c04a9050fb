// Do two ranks mean rows of the same kind?
#pragma once

#include "kernels/common/rows.hpp"
#include "kernels/common/wait.hpp"

namespace deep_ep::device {

/// Compares the rows of two ranks.
struct RowComparison {
  int field = -1;  ///< the first RowField in which they differ; negative: they agree
  std::uint64_t ours = 0, theirs = 0;

  DEEP_EP_DEVICE void compare(RowField which, std::int64_t our_value, std::int64_t their_value) {
    if (field >= 0 || our_value == their_value) return;
    field = static_cast<int>(which);
    ours = static_cast<std::uint64_t>(our_value);
    theirs = static_cast<std::uint64_t>(their_value);
  }
  DEEP_EP_DEVICE void compare(const RowShape& ours_is, const DispatchAddresses& theirs_is) {
    compare(RowField::row_bytes, ours_is.row_bytes, theirs_is.row_bytes);
    compare(RowField::num_scales, ours_is.num_scales, theirs_is.num_scales);
    compare(RowField::num_topk, ours_is.num_topk, theirs_is.num_topk);
  }
  /// Do they agree with what `told` has brought? Ends the call otherwise: but not before this rank's own word, which
  /// `own` signals, is on its way to all. It comes from another block, which would not begin any more, and peers would
  /// wait for it in vain.
  DEEP_EP_DEVICE bool agrees(const WaitContext& wait, const std::uint64_t* own, int own_rank,
                             const Awaited& told) const {
    if (field < 0) return true;
    wait_signal(ReportLateHere{{wait}}, own, {own_rank, told.wanted, told.expected});
    report_fault_here(wait, FaultKind::mismatch, told.wanted, told.peer, field, ours, theirs);
    return false;
  }
};

}  // namespace deep_ep::device
