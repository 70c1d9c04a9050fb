// A buffer tries this before low-latency calls rely on it: see kernels/low_latency/line_test.hpp.
#pragma once

#include <memory>

#include "csrc/executor/backend.hpp"
#include "csrc/memory/symmetric_heap.hpp"
#include "deep_ep/bootstrap.hpp"
#include "kernels/low_latency/line_test.hpp"

namespace deep_ep {

struct LineCheck {
  int rounds = 2000;  ///< some microseconds each
  double timeout_s = 100;
  Launcher<LineTestParams> kernel = nullptr;  ///< nullptr: the executor's
};

/// Collective, on a heap that nobody uses yet; it is full of zeros before and after. SystemError on every rank if lines
/// of one rank do not arrive whole at another, TimeoutError on one that waits in vain.
void check_lines(Bootstrap& bootstrap, const std::shared_ptr<Backend>& executor, const SymmetricHeap& heap,
                 StreamHandle stream, const LineCheck& check);

}  // namespace deep_ep
