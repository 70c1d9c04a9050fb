// Which row came back for each selection: rows say it themselves. What no row speaks of is left as it is, so whoever
// looks here asks the row again.
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/thread.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep::device {

DEEP_EP_DEVICE void find_returned_rows_body(const SumRowsParams& params, std::byte* /*shared*/) {
  const std::int64_t rows = params.metadata.valid(), selections = params.num_tokens * params.metadata.num_topk;
  const std::int64_t threads = std::int64_t{grid_blocks()} * block_threads();
  for (std::int64_t row = std::int64_t{block_index()} * block_threads() + thread_index(); row < rows; row += threads) {
    const std::int64_t id = load_weak(params.metadata.row(row));
    if (id >= 0 && id < selections) params.row_of[id] = static_cast<std::int32_t>(row);
  }
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(find_returned_rows, deep_ep::device::find_returned_rows_body)
