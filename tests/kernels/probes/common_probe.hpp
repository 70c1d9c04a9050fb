// Kernels that exercise kernels/common; common_test.cpp knows what must come out.
#pragma once

#include "kernels/common/call.hpp"
#include "kernels/common/faults.hpp"
#include "kernels/primitives/launch.hpp"

namespace deep_ep::probes {

/// Warp 0 waits as a whole, one thread of warp 1 by itself; nobody signals unless `value` is what they expect.
struct WaitParams {
  WaitContext wait;
  std::uint64_t* signal;
  std::uint64_t expected;
  std::uint64_t value;      ///< stored by the last warp; 0: nothing is
  std::uint32_t* payload;   ///< written before
  std::uint32_t* returned;  ///< [64]: one per thread; 1: false, 2: true, 3: true but the payload was not there
};

struct CallParams {
  CallCounter* counter;
  WaitContext wait;
  std::uint64_t* epochs;    ///< one per block: which call it thinks this is, 0: none
  std::uint32_t* finished;  ///< [1]: how often a call was ended
};

/// A warp serves the nodes of a grid of three, from none of which anything comes.
struct ServeParams {
  WaitContext wait;
  const std::uint64_t* never;  ///< [1]: the word awaited, which stays 0
  std::uint32_t* returned;     ///< [32]: one per lane; 1: false, 2: true
};

struct WholeBlockParams {
  int odd;                  ///< the thread that is not good; -1: none
  std::uint32_t* returned;  ///< [96]: what each thread hears
};

}  // namespace deep_ep::probes

DEEP_EP_DECLARE_KERNEL(wait_probe, deep_ep::probes::WaitParams, 96)
DEEP_EP_DECLARE_KERNEL(call_probe, deep_ep::probes::CallParams, 64)
DEEP_EP_DECLARE_KERNEL(serve_probe, deep_ep::probes::ServeParams, 32)
DEEP_EP_DECLARE_KERNEL(whole_block_probe, deep_ep::probes::WholeBlockParams, 96)
