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
  Kind kind;
  std::int32_t count;
  std::int32_t position[LowLatencyWindow::kMostTopk];  ///< row of x
  float weight[LowLatencyWindow::kMostTopk];
};

/// So many rows fall to each of `groups` of a grid, at most.
DEEP_EP_HOST_DEVICE constexpr int rows_of_group(int num_ranks, int max_tokens, int groups) {
  return groups == 0 ? 0 : (num_ranks * max_tokens + groups - 1) / groups;
}

struct CombineBlockLayout {
  int groups;                 ///< of warps that push
  int stages;                 ///< of a group
  int rows;                   ///< that may fall to a group
  std::uint32_t stage_bytes;  ///< a row as it travels

  DEEP_EP_HOST_DEVICE static constexpr std::size_t sources_at() { return 128; }
  DEEP_EP_HOST_DEVICE static constexpr std::size_t choices_at() {
    return sources_at() + align(2 * sizeof(CombineSources));
  }
  DEEP_EP_HOST_DEVICE std::size_t stages_at() const {
    return choices_at() +
           align((sizeof(CombineChoice) + sizeof(std::uint32_t) * words()) * static_cast<std::size_t>(groups));
  }
  DEEP_EP_HOST_DEVICE std::size_t bytes() const {
    return stages_at() + static_cast<std::size_t>(groups * stages) * align(stage_bytes);
  }

  DEEP_EP_HOST_DEVICE std::uint32_t aligned_stage_bytes() const {
    return static_cast<std::uint32_t>(align(stage_bytes));
  }

  /// What one thread has read for all.
  DEEP_EP_HOST_DEVICE device::Epochs* epochs(std::byte* memory) const {
    return reinterpret_cast<device::Epochs*>(memory);
  }
  /// Two, for tokens in turn.
  DEEP_EP_HOST_DEVICE CombineSources* sources(std::byte* memory) const {
    return reinterpret_cast<CombineSources*>(memory + sources_at());
  }
  DEEP_EP_HOST_DEVICE CombineChoice* choice(std::byte* memory, int group) const {
    return reinterpret_cast<CombineChoice*>(memory + choices_at()) + group;
  }
  /// A bit for each row of the group that has been put off.
  DEEP_EP_HOST_DEVICE std::uint32_t* put_off(std::byte* memory, int group) const {
    auto* begin = reinterpret_cast<std::uint32_t*>(choice(memory, groups));
    return begin + static_cast<std::size_t>(group) * words();
  }
  DEEP_EP_HOST_DEVICE std::size_t words() const { return (static_cast<std::size_t>(rows) + 31) / 32; }
  DEEP_EP_HOST_DEVICE std::byte* first_stage(std::byte* memory, int group) const {
    return memory + stages_at() + static_cast<std::size_t>(group * stages) * align(stage_bytes);
  }

 private:
  DEEP_EP_HOST_DEVICE static constexpr std::size_t align(std::size_t bytes) { return (bytes + 127) / 128 * 128; }
};

}  // namespace deep_ep
