// Rows of a dispatch of normal mode, and what travels beside them.
#pragma once

#include <cstdint>

#include "kernels/common/carver.hpp"
#include "kernels/common/faults.hpp"
#include "kernels/common/messages.hpp"
#include "kernels/common/topk.hpp"
#include "kernels/primitives/divisor.hpp"

namespace deep_ep {

/// Sizes of a row of dispatch and of what travels beside it.
struct RowShape {
  std::uint32_t row_bytes;  ///< multiple of 16
  std::int32_t num_scales;  ///< 4-byte words
  std::int32_t num_topk;
  bool topk_idx_is_64_bit;

  DEEP_EP_HOST_DEVICE std::uint32_t topk_idx_bytes() const {
    return static_cast<std::uint32_t>(num_topk) * (topk_idx_is_64_bit ? 8 : 4);
  }
};

/// The memory for a rank's rows: in the heap (final place or window), or its own, for rows that are copied from rings
/// or from the window.
struct RowTargets {
  std::byte* x;
  std::uint32_t* scales;
  std::byte* topk_idx;
  float* topk_weights;
  std::int32_t* src_idx;

  /// Room for `rows` rows in a window. Each part begins a line.
  static RowTargets carve(Carver& carver, const RowShape& shape, std::size_t rows) {
    return {carver.take<std::byte>(rows * shape.row_bytes, kLine),
            carver.take<std::uint32_t>(rows * static_cast<std::size_t>(shape.num_scales), kLine),
            carver.take<std::byte>(rows * shape.topk_idx_bytes(), kLine),
            carver.take<float>(rows * static_cast<std::size_t>(shape.num_topk), kLine),
            carver.take<std::int32_t>(rows, kLine)};
  }

  struct Row {
    const RowTargets& in;
    const RowShape& shape;
    std::int64_t i;

    DEEP_EP_DEVICE std::byte* x() const { return in.x + i * shape.row_bytes; }
    DEEP_EP_DEVICE std::uint32_t* scales() const { return in.scales + i * shape.num_scales; }
    DEEP_EP_DEVICE std::byte* topk_idx() const { return in.topk_idx + i * shape.topk_idx_bytes(); }
    DEEP_EP_DEVICE float* topk_weights() const { return in.topk_weights + i * shape.num_topk; }
    DEEP_EP_DEVICE std::int32_t* src_idx() const { return in.src_idx + i; }
  };
  DEEP_EP_DEVICE Row row(const RowShape& shape, std::int64_t i) const { return {*this, shape, i}; }

  /// The same rows as seen from `begin`, where this thread sees `own_begin`. Parts that are missing mean nothing.
  DEEP_EP_DEVICE RowTargets seen_from(const std::byte* begin, const std::byte* own_begin) const {
    const auto by = reinterpret_cast<std::uintptr_t>(begin) - reinterpret_cast<std::uintptr_t>(own_begin);
    const auto move = [&](auto* at) {
      return reinterpret_cast<decltype(at)>(reinterpret_cast<std::uintptr_t>(at) + by);
    };
    return {move(x), move(scales), move(topk_idx), move(topk_weights), move(src_idx)};
  }
};

/// A rank tells each sender by this where its rows of a dispatch go.
struct DispatchAddresses {
  RowTargets rows;         ///< as offsets in its heap
  std::int32_t capacity;   ///< rows it has room for in all
  std::int32_t by_ring;    ///< there are no offsets: rows go through the local rings (LocalRings)
  std::int32_t agreed[3];  ///< see kAgreedRowsToPeer; also where no counts are exchanged (cached calls)
};

/// The scales of the rows that are sent, as the caller laid them out. Strides in words.
struct ScaleLayout {
  const std::uint32_t* words;
  std::int64_t token_stride, stride;

  DEEP_EP_DEVICE const std::uint32_t* at(int token, int i) const { return words + token * token_stride + i * stride; }
};

/// What a dispatch sends. Plain data, set by the host.
struct SentRows {
  RowShape rows;
  int num_tokens;
  const std::byte* x;  ///< [num_tokens] rows
  ScaleLayout scales;
  TopkIndices topk_idx;
  const float* topk_weights;  ///< nullptr: zeros travel in their place
  Divisor num_local_experts;
  bool send_src_idx;  ///< false when a handle already knows it
};

}  // namespace deep_ep
