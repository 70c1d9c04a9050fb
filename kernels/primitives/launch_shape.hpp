// Grid of a launch. Plain data, known to the host side and to every target.
#pragma once

#include <cstddef>

namespace deep_ep {

struct LaunchShape {
  int blocks = 1;
  int threads = 32;              ///< per block, a multiple of 32
  std::size_t shared_bytes = 0;  ///< dynamic shared memory per block
};

}  // namespace deep_ep
