// Parts that dispatch and combine of the second interface share.
#pragma once

#include <cstddef>

#include "csrc/buffer/normal_mode.hpp"
#include "deep_ep/elastic.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep {

/// Of [N, K + 2] int32, columns of a row next to each other; `source_ends` says how many rows are valid.
RowMetadata row_metadata(const ConstTensorView& metadata, const ConstTensorView& source_ends, const Device& device);

/// Lays the window, whose sizes of a token are set, out from offset `at` in the heap's window to its end: `tokens` is
/// how many fit, at most all. The same on all ranks. OutOfMemory if none does.
void fit_window(TokenWindow& window, std::size_t at, const Runtime& runtime);

/// Enqueues the kernel, on as many multiprocessors as the policy has. Sets `pipe`.
void spread_rows(SpreadRowsParams& params, const LaunchPolicy& policy, const Runtime& runtime, const CallScope& scope);

}  // namespace deep_ep
