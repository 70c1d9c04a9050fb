// Shared memory of a block of the low-latency combine.
#pragma once

#include "kernels/low_latency/combine/wire.hpp"
#include "kernels/low_latency/transport/head.hpp"
#include "kernels/low_latency/transport/masks.hpp"

namespace deep_ep {

/// So many rows fall to each of `groups` of a grid, at most.
DEEP_EP_HOST_DEVICE constexpr int rows_of_group(int num_ranks, int max_tokens, int groups) {
  return groups == 0 ? 0 : (num_ranks * max_tokens + groups - 1) / groups;
}

/// What one thread has read for all, and then what each warp has for itself: a bit for each row that may fall to it,
/// and a stage, for the sums of its share of a row, or to decode a pass of LogFMT.
struct CombineBlockLayout {
  int warps;
  int rows;  ///< that may fall to a warp
  std::size_t stage_bytes;

  /// `groups`: of warps that push, 0 without a send part.
  DEEP_EP_HOST_DEVICE static CombineBlockLayout make(const CombineWire& wire, int warps, int groups, int warps_per_row,
                                                     int rows) {
    using namespace device::low_latency;
    const std::size_t pushing = groups == 0   ? 0
                                : wire.logfmt ? WarpShare<true>{0, warps_per_row}.stage_bytes(wire)
                                              : WarpShare<false>{0, warps_per_row}.stage_bytes(wire);
    const std::size_t adding = wire.logfmt ? CombineWire::kStageBytes : 0;
    return {warps, rows, pushing > adding ? pushing : adding};
  }

  struct Words {
    device::Epochs epochs;
    device::MaskWords masks;
  };

  DEEP_EP_HOST_DEVICE Words& words(std::byte* memory) const { return *reinterpret_cast<Words*>(memory); }
  /// In blocks that post, instead of the rest.
  DEEP_EP_HOST_DEVICE static std::byte* poster_words(std::byte* memory) { return memory + bits_at(); }
  DEEP_EP_HOST_DEVICE static std::size_t poster_bytes(int warps) {
    return bits_at() + static_cast<std::size_t>(warps) * sizeof(LowLatencyPosterWords);
  }
  DEEP_EP_HOST_DEVICE std::uint32_t* put_off(std::byte* memory, int warp) const {
    return reinterpret_cast<std::uint32_t*>(memory + bits_at() + static_cast<std::size_t>(warp) * bits_bytes());
  }
  DEEP_EP_HOST_DEVICE std::byte* stage(std::byte* memory, int warp) const {
    return memory + stages_at() + static_cast<std::size_t>(warp) * stage_bytes;
  }
  DEEP_EP_HOST_DEVICE std::size_t bytes() const { return stages_at() + static_cast<std::size_t>(warps) * stage_bytes; }

 private:
  DEEP_EP_HOST_DEVICE static std::size_t bits_at() { return align_to_line(sizeof(Words)); }
  DEEP_EP_HOST_DEVICE std::size_t bits_bytes() const {
    return sizeof(std::uint32_t) * ((static_cast<std::size_t>(rows) + 31) / 32);
  }
  DEEP_EP_HOST_DEVICE std::size_t stages_at() const {
    return align_to_line(bits_at() + static_cast<std::size_t>(warps) * bits_bytes());
  }
};

}  // namespace deep_ep
