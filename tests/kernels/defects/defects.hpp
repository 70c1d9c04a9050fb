// Kernels with one classic mistake each, next to the right way: `planted` chooses. See defects_test.cpp.
#pragma once

#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/target.hpp"

namespace deep_ep {
struct LineTestParams;
}

namespace deep_ep::defects {

inline constexpr int kRows = 6;       ///< rows that travel
inline constexpr int kRowWords = 32;  ///< 16-byte words of a row: one per lane
inline constexpr int kSharedBytes = 4096;

struct Params {
  bool planted = false;
  std::uint64_t epoch = 1;                ///< number of the call, counted from 1
  std::uint64_t* signal = nullptr;        ///< [2]
  const device::Vec16* source = nullptr;  ///< [kRows][kRowWords]
  device::Vec16* destination = nullptr;   ///< the same
  std::uint32_t* result = nullptr;        ///< one per thread of the grid
};

}  // namespace deep_ep::defects

// Between blocks: signal_defects.cu. Block 0 sends, block 1 receives; one warp each.
DEEP_EP_DECLARE_KERNEL(defect_relaxed_flag, deep_ep::defects::Params, 32)
DEEP_EP_DECLARE_KERNEL(defect_signal_before_completion, deep_ep::defects::Params, 32)
DEEP_EP_DECLARE_KERNEL(defect_load_without_fence, deep_ep::defects::Params, 32)
DEEP_EP_DECLARE_KERNEL(defect_wrong_epoch, deep_ep::defects::Params, 32)
DEEP_EP_DECLARE_KERNEL(defect_signal_without_warp_sync, deep_ep::defects::Params, 32)

// Calls that take turns: low_latency_defects.cu.
DEEP_EP_DECLARE_KERNEL(defect_flag_without_epoch, deep_ep::defects::Params, 32)
DEEP_EP_DECLARE_KERNEL(defect_credit_ignored, deep_ep::defects::Params, 32)
DEEP_EP_DECLARE_KERNEL(defect_credit_without_fence, deep_ep::defects::Params, 32)
DEEP_EP_DECLARE_KERNEL(defect_signal_without_fence, deep_ep::defects::Params, 32)

// Of what a buffer tries when it is made: line_defects.cu.
DEEP_EP_DECLARE_KERNEL(defect_torn_lines, deep_ep::LineTestParams, 256)
DEEP_EP_DECLARE_KERNEL(defect_no_lines, deep_ep::LineTestParams, 256)

// Bulk copies of one warp: bulk_defects.cu. Rows of source go to destination.
DEEP_EP_DECLARE_KERNEL(defect_stage_reused, deep_ep::defects::Params, 32)
DEEP_EP_DECLARE_KERNEL(defect_missing_publish, deep_ep::defects::Params, 32)
DEEP_EP_DECLARE_KERNEL(defect_exit_without_wait, deep_ep::defects::Params, 32)
DEEP_EP_DECLARE_KERNEL(defect_parity_not_flipped, deep_ep::defects::Params, 32)
DEEP_EP_DECLARE_KERNEL(defect_wrong_bytes, deep_ep::defects::Params, 32)
DEEP_EP_DECLARE_KERNEL(defect_load_into_stage_in_use, deep_ep::defects::Params, 32)

// Inside a block: sync_defects.cu. Thread t's result is 1000 + its partner's index.
DEEP_EP_DECLARE_KERNEL(defect_missing_warp_sync, deep_ep::defects::Params, 128)
DEEP_EP_DECLARE_KERNEL(defect_missing_block_sync, deep_ep::defects::Params, 128)
DEEP_EP_DECLARE_KERNEL(defect_uninitialised_shared, deep_ep::defects::Params, 128)
