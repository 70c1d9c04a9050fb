// Where threads of a block meet.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/primitives/host/machine.hpp"
#include "machine/fiber.hpp"

namespace deep_ep::host_machine {

/// So many threads, again and again.
struct Gathering {
  int threads;                              ///< of an mbarrier: arrivals
  const std::uint64_t* mbarrier = nullptr;  ///< its word
  int arrived = 0;
  unsigned generation = 0;
  std::vector<Fiber*> waiting{};
  MeetingPoint sync_point[2] = {};

  explicit Gathering(int of_threads, const std::uint64_t* of_mbarrier = nullptr)
      : threads(of_threads), mbarrier(of_mbarrier) {}
};

struct Warp : Gathering {
  static constexpr int kLanes = 32;

  const char* op = "";  ///< of the lanes that arrived
  int bytes = 0;
  /// Two generations: a fast lane may bring its next value while a slow one still reads. It cannot be further ahead,
  /// because the next-but-one exchange needs the slow lane.
  alignas(16) std::byte slots[2][kLanes * kExchangeSlot];

  Warp() : Gathering(kLanes) {}
};

/// The barrier of a block.
struct Barrier : Gathering {
  bool good[2] = {true, true};  ///< in each of those that came, by generation

  using Gathering::Gathering;
};

/// A load that was issued and whose bytes have not arrived.
struct BulkLoad {
  Fiber* issuer;
  std::byte* shared;
  const std::byte* global;
  std::uint32_t bytes;
};

/// The word of an mbarrier in shared memory holds a ticket; the state is here. A generation is a phase.
struct MbarrierState : Gathering {
  std::int64_t expected_bytes = 0;   ///< announced and not written yet; below zero: written and not announced yet
  bool fenced = false;               ///< fence_init made it known to the copy engine
  std::vector<BulkLoad> loads = {};  ///< issued, not done

  bool ended(std::uint32_t parity) const { return (generation & 1u) != parity; }
};

}  // namespace deep_ep::host_machine
