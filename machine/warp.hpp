// Where threads of a block meet.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/primitives/host/machine.hpp"
#include "machine/fiber.hpp"
#include "machine/proxy_order.hpp"

namespace deep_ep::host_machine {

/// So many threads, again and again.
struct Gathering {
  int threads;
  int arrived = 0;
  unsigned generation = 0;
  std::vector<Fiber*> waiting{};
  MeetingPoint sync_point[2] = {};

  explicit Gathering(int of_threads) : threads(of_threads) {}
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

}  // namespace deep_ep::host_machine
