// A kernel that sends operations of random kinds and sizes, a flag behind those of each round, and looks at all that
// arrives.
#pragma once

#include "kernels/common/wait.hpp"
#include "kernels/primitives/launch.hpp"
#include "kernels/rdma/params.hpp"

namespace deep_ep::test {

/// One rank's launch: a block of two warps (one sends, one receives) for each pair of queue pairs (channels 2i and
/// 2i + 1) to each rank. Heaps look alike on all ranks: kPattern bytes that are the same everywhere, then an area of
/// kAreaBytes for each of these pairs.
struct RandomParams {
  static constexpr std::uint32_t kPattern = 1 << 16;
  static constexpr std::uint32_t kSlots = 32;      ///< of a round
  static constexpr std::uint32_t kMost = 1 << 14;  ///< bytes of a write
  static constexpr std::uint32_t kSlotBytes = kMost + 64;
  static constexpr std::uint64_t kIncoming = 1024;  ///< before it: signal, answer, counters
  static constexpr std::uint64_t kAreaBytes = kIncoming + 2 * kSlots * kSlotBytes;

  int rank = 0;
  int num_ranks = 0;
  std::uint64_t first_round = 1;  ///< counts over launches
  std::uint64_t rounds = 0;
  std::uint64_t seed = 1;
  const RdmaPeerParams* peers = nullptr;  ///< [channels][num_ranks]
  std::byte* heap = nullptr;
  std::uint64_t* wrong = nullptr;  ///< bytes, sums
  WaitContext wait;

  /// What comes from, or goes to, a rank by a channel.
  DEEP_EP_HOST_DEVICE std::uint64_t area(int channel, int other) const {
    return kPattern + kAreaBytes * static_cast<std::uint64_t>(channel * num_ranks + other);
  }
  DEEP_EP_HOST_DEVICE static std::uint64_t heap_bytes(int channels, int ranks) {
    return kPattern + kAreaBytes * static_cast<std::uint64_t>(channels * ranks);
  }
};

}  // namespace deep_ep::test

DEEP_EP_DECLARE_KERNEL(random_operations, deep_ep::test::RandomParams, 64)
