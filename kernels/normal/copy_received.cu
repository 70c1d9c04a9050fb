// The kernel copies rows that a dispatch has landed in the window to the results, which the heap had no room for. Rows
// keep their order, so each part is one range of bytes: rows go in pieces, by bulk copies; scales, weights and indices
// by threads.
#include "kernels/common/row_pipe.hpp"
#include "kernels/kernel_list.hpp"
#include "kernels/normal/params.hpp"
#include "kernels/normal/row_copy.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::device {

/// By warp `warp` of `warps`: its share of a range, a multiple of 4 bytes.
DEEP_EP_DEVICE void copy_beside(void* to, const void* from, std::int64_t bytes, std::int64_t warp, std::int64_t warps) {
  const std::int64_t share = (bytes + 16 * warps - 1) / (16 * warps) * 16;
  const std::int64_t begin = warp * share;
  if (to == nullptr || begin >= bytes) return;
  const auto length = static_cast<std::uint32_t>(bytes - begin < share ? bytes - begin : share);
  auto* const target = static_cast<std::byte*>(to) + begin;
  const auto* const source = static_cast<const std::byte*>(from) + begin;
  const bool aligned = (reinterpret_cast<std::uintptr_t>(to) | reinterpret_cast<std::uintptr_t>(from)) % 16 == 0;
  const std::uint32_t in_vectors = aligned ? length / 16 * 16 : 0;
  copy_row(target, source, in_vectors);
  copy_words(target + in_vectors, source + in_vectors, length - in_vectors);
}

/// By a whole warp: every `step`-th piece of a range, from the one at `first` on. While that loads, `meanwhile()`.
template <class Meanwhile>
DEEP_EP_DEVICE void copy_pieces(RowPipe pipe, std::byte* to, const std::byte* from, std::int64_t bytes,
                                std::int64_t first, std::int64_t step, Meanwhile meanwhile) {
  const auto length = [&](std::int64_t at) {
    const std::int64_t left = bytes - at;
    return left < pipe.stage_bytes ? static_cast<std::uint32_t>(left) : pipe.stage_bytes;
  };
  if (first < bytes) pipe.load(from + first, length(first));
  meanwhile();
  for (std::int64_t at = first; at < bytes; at += step) {
    if (at + step < bytes) pipe.load(from + at + step, length(at + step));
    pipe.store(length(at), [&](auto store) {
      if (lane_index() == 0) store(to + at);
    });
  }
  pipe.drop();
}

DEEP_EP_DEVICE void copy_received_body(const CopyReceivedParams& params, std::byte* memory) {
  const WarpStages shared(Carver(memory), block_warps(), params.stages, params.stage_bytes);
  const RowShape& shape = params.rows;
  const std::int64_t came = load_weak(params.num_valid);
  const std::int64_t valid = came < params.num_rows ? came : params.num_rows;
  const RowPipe pipe = shared.pipe(warp_index());
  if (lane_index() == 0) pipe.init();
  const std::int64_t warps = std::int64_t{grid_blocks()} * block_warps();
  const std::int64_t warp = std::int64_t{warp_index()} * grid_blocks() + block_index();
  copy_pieces(pipe, params.to.x, params.from.x, valid * shape.row_bytes, warp * params.stage_bytes,
              warps * params.stage_bytes, [&] {
                const RowTargets &to = params.to, &from = params.from;
                const std::int64_t all = params.num_rows;  // -1 where there is no row
                copy_beside(to.topk_idx, from.topk_idx, all * shape.topk_idx_bytes(), warp, warps);
                copy_beside(to.scales, from.scales, valid * shape.scale_bytes(), warp, warps);
                copy_beside(to.topk_weights, from.topk_weights, valid * shape.topk_weight_bytes(), warp, warps);
                copy_beside(to.src_idx, from.src_idx, valid * std::int64_t{sizeof(std::int32_t)}, warp, warps);
              });
}

}  // namespace deep_ep::device

DEEP_EP_DEFINE_KERNEL(copy_received, deep_ep::device::copy_received_body)
