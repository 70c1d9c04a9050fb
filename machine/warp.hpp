// Where the 32 lanes of a warp meet.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/primitives/host/machine.hpp"
#include "machine/fiber.hpp"
#include "machine/proxy_order.hpp"

namespace deep_ep::host_machine {

struct Warp {
  static constexpr int kLanes = 32;

  int arrived = 0;
  unsigned generation = 0;
  WarpOp op = WarpOp::sync;  ///< of the lanes that arrived
  int bytes = 0;
  Fiber* waiting[kLanes] = {};
  /// Two generations: a fast lane may bring its next value while a slow one still reads. It cannot be further ahead,
  /// because the next-but-one exchange needs the slow lane.
  alignas(16) std::byte slots[2][kLanes * kExchangeSlot];
  MeetingPoint sync_point[2];
};

/// The barrier of a block.
struct Barrier {
  int arrived = 0;
  unsigned generation = 0;
  std::vector<Fiber*> waiting;
  MeetingPoint sync_point[2];
};

}  // namespace deep_ep::host_machine
