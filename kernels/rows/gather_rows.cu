// Rows in another order: a warp moves a row. Rows that nobody asks for are neither read nor written.
#include "kernels/kernel_list.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/primitives/memory.hpp"
#include "kernels/primitives/thread.hpp"
#include "kernels/rows/params.hpp"

namespace deep_ep::device {

/// By a whole warp; `from` nullptr: zeros.
template <class Unit>
DEEP_EP_DEVICE void move_row(std::byte* to, const std::byte* from, std::uint32_t bytes) {
  constexpr int kTogether = 4;  // loads under way at once
  const auto units = static_cast<int>(bytes / sizeof(Unit));
  for (int first = lane_index(); first < units; first += kTogether * kWarpSize) {
    Unit held[kTogether] = {};
    for (int i = 0; i < kTogether; ++i) {
      const int at = first + i * kWarpSize;
      if (from != nullptr && at < units) held[i] = load_weak(reinterpret_cast<const Unit*>(from) + at);
    }
    for (int i = 0; i < kTogether; ++i) {
      const int at = first + i * kWarpSize;
      if (at < units) store_stream(reinterpret_cast<Unit*>(to) + at, held[i]);
    }
  }
}

DEEP_EP_DEVICE void gather_rows_body(const GatherRowsParams& params, std::byte* /*shared*/) {
  const std::int64_t warps = std::int64_t{grid_blocks()} * block_warps();
  for (std::int64_t row = std::int64_t{block_index()} * block_warps() + warp_index(); row < params.num_gathered;
       row += warps) {
    const std::int64_t wanted = load_weak(params.index + row);
    if (wanted == -1 || wanted >= params.num_rows) continue;
    std::byte* const to = params.gathered + row * params.row_bytes;
    const std::byte* const from = wanted < 0 ? nullptr : params.rows + wanted * params.row_bytes;
    if (params.unit_bytes == static_cast<int>(sizeof(Vec16))) {
      move_row<Vec16>(to, from, params.row_bytes);
    } else {
      move_row<std::uint32_t>(to, from, params.row_bytes);
    }
  }
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(gather_rows, deep_ep::device::gather_rows_body)
