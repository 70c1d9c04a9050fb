// Shared memory of a block of the low-latency combine.
#pragma once

#include "kernels/low_latency/combine_wire.hpp"
#include "kernels/low_latency/head.hpp"

namespace deep_ep {

/// Threads of a block at most: what is left of the registers for each keeps all loads under way that hide latency.
constexpr int kCombineThreads = 768;
constexpr int kCombineLogfmtThreads = 640;

/// The rows that make up a token, by rank.
struct CombineSources {
  std::int32_t count;  ///< -1: the call has been called off
  const std::byte* row[LowLatencyWindow::kMostTopk];
};

/// What a pushing group adds up.
struct CombineChoice {
  enum Kind : std::int32_t {
    as_dispatched,  ///< exactly the rows that the dispatch brought, in their order
    others,         ///< the rows listed here: selections have gone, or changed places
    none,           ///< not sent now: nothing is left of it, its owner is masked, or has not said yet what it wants
    stop,           ///< there are no more rows
  };
  std::uint64_t begin;  ///< when the group began: how long owners have been waited for
  Kind kind;
  std::int32_t count;
  std::int32_t position[LowLatencyWindow::kMostTopk];  ///< row of x
  float weight[LowLatencyWindow::kMostTopk];
};

/// So many rows fall to each of `groups` of a grid, at most.
DEEP_EP_HOST_DEVICE constexpr int rows_of_group(int num_ranks, int max_tokens, int groups) {
  return groups == 0 ? 0 : (num_ranks * max_tokens + groups - 1) / groups;
}

/// Shared memory of a pushing group: its stages, what it adds up, and a bit for each of its rows.
struct CombineGroupLayout {
  int stages;
  std::uint32_t row_bytes;  ///< as it travels
  int rows;                 ///< that may fall to the group

  DEEP_EP_HOST_DEVICE static constexpr std::size_t aligned(std::size_t bytes) { return (bytes + 127) / 128 * 128; }
  DEEP_EP_HOST_DEVICE std::size_t stage_bytes() const { return aligned(row_bytes); }
  DEEP_EP_HOST_DEVICE std::size_t choice_at() const { return static_cast<std::size_t>(stages) * stage_bytes(); }
  DEEP_EP_HOST_DEVICE std::size_t put_off_at() const { return choice_at() + sizeof(CombineChoice); }
  DEEP_EP_HOST_DEVICE std::size_t bytes() const {
    return aligned(put_off_at() + sizeof(std::uint32_t) * ((static_cast<std::size_t>(rows) + 31) / 32));
  }
};

struct CombineBlockLayout {
  int groups;  ///< of warps that push
  CombineGroupLayout group;

  DEEP_EP_HOST_DEVICE static constexpr std::size_t sources_at() { return 128; }
  DEEP_EP_HOST_DEVICE static constexpr std::size_t groups_at() {
    return sources_at() + CombineGroupLayout::aligned(2 * sizeof(CombineSources));
  }
  DEEP_EP_HOST_DEVICE std::size_t bytes() const {
    return groups_at() + static_cast<std::size_t>(groups) * group.bytes();
  }

  /// What one thread has read for all.
  DEEP_EP_HOST_DEVICE device::Epochs* epochs(std::byte* memory) const {
    return reinterpret_cast<device::Epochs*>(memory);
  }
  /// Two, for tokens in turn.
  DEEP_EP_HOST_DEVICE CombineSources* sources(std::byte* memory) const {
    return reinterpret_cast<CombineSources*>(memory + sources_at());
  }
  DEEP_EP_HOST_DEVICE std::byte* of_group(std::byte* memory, int index) const {
    return memory + groups_at() + static_cast<std::size_t>(index) * group.bytes();
  }
};

}  // namespace deep_ep
