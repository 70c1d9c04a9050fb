// Shared memory of a block of the low-latency combine.
#pragma once

#include "kernels/low_latency/combine/wire.hpp"
#include "kernels/low_latency/transport/masks.hpp"
#include "kernels/rdma/poster.hpp"

namespace deep_ep::device::low_latency {

/// The most rows that fall to each of `groups` groups of a grid.
DEEP_EP_HOST_DEVICE constexpr int rows_of_group(int num_ranks, int max_tokens, int groups) {
  return groups == 0 ? 0 : (num_ranks * max_tokens + groups - 1) / groups;
}

/// What one thread has read for all; then, for each warp, a bit for each row that may fall to it, and where it pushes,
/// a stage for the sums of its share of a row.
struct CombineShared {
  struct Words {
    LowLatencyEpochs epochs;
    std::uint32_t call;  ///< see call_of()
    MaskWords masks;
  };

  Words* words;
  rdma::PosterWords* posters;  ///< in blocks that post, instead of the rest: of each warp
  std::uint32_t* deferred_bits;
  std::byte* stages;
  std::size_t bytes;

  /// `groups`: of warps that push, 0 without a send part. `rows`: that may fall to a warp. `poster_warps`: 0 where
  /// nothing is posted.
  DEEP_EP_HOST_DEVICE CombineShared(Carver carver, const CombineWire& wire, int warps, int groups,
                                    const Divisor& warps_per_row, int rows, int poster_warps)
      : deferred_words_((static_cast<std::size_t>(rows) + 31) / 32) {
    stage_bytes_ = groups == 0 ? 0
                   : wire.fp8  ? WarpShare<true>{0, warps_per_row}.stage_bytes(wire)
                               : WarpShare<false>{0, warps_per_row}.stage_bytes(wire);
    words = carver.take<Words>();
    Carver instead = carver;
    posters = instead.take<rdma::PosterWords>(static_cast<std::size_t>(poster_warps), kLine);
    deferred_bits = carver.take<std::uint32_t>(static_cast<std::size_t>(warps) * deferred_words_, kLine);
    stages = carver.take<std::byte>(static_cast<std::size_t>(warps) * stage_bytes_, kLine);
    bytes = carver.bytes() > instead.bytes() ? carver.bytes() : instead.bytes();
  }

  DEEP_EP_DEVICE std::uint32_t* deferred(int warp) const {
    return deferred_bits + static_cast<std::size_t>(warp) * deferred_words_;
  }
  DEEP_EP_DEVICE std::byte* stage(int warp) const { return stages + static_cast<std::size_t>(warp) * stage_bytes_; }

 private:
  std::size_t deferred_words_;  ///< of a warp
  std::size_t stage_bytes_;     ///< of a warp
};

/// The same where nothing is added up before the owner does; a stage to cast rows in where they travel in FP8.
struct UnreducedShared {
  CombineShared::Words* words;
  std::byte* stages;
  std::size_t bytes;

  DEEP_EP_HOST_DEVICE UnreducedShared(Carver carver, const CombineWire& wire, int warps)
      : words(carver.take<CombineShared::Words>()) {
    const std::size_t rows = wire.fp8 ? static_cast<std::size_t>(warps) * CombineWire::kFp8PassBytes : 0;
    stages = carver.take<std::byte>(rows, rows == 0 ? 1 : kLine);
    bytes = carver.bytes();
  }

  DEEP_EP_DEVICE std::byte* stage(int warp) const {
    return stages + static_cast<std::size_t>(warp) * CombineWire::kFp8PassBytes;
  }
};

/// Which call's sums a relay adds up.
struct SummedCall {
  std::uint64_t epoch;  ///< 0: of none, as the send part has failed
  std::uint32_t call;   ///< see call_of()
};

/// Shared memory of a block of the relay.
struct SumRelayShared {
  SummedCall* found;
  rdma::PosterWords* posters;  ///< of each warp that posts
  std::size_t bytes;

  DEEP_EP_HOST_DEVICE SumRelayShared(Carver carver, int poster_warps)
      : found(carver.take<SummedCall>()),
        posters(carver.take<rdma::PosterWords>(static_cast<std::size_t>(poster_warps), kLine)),
        bytes(carver.bytes()) {}
};

}  // namespace deep_ep::device::low_latency
