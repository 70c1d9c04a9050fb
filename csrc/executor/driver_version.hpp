// Which drivers of NVIDIA's run the programs of a CUDA release, and the sentence for one that does not.
#pragma once

#include <string>

#include "csrc/support/format.hpp"

namespace deep_ep::cuda {

/// The first driver, by its major version, that runs programs of this major release of CUDA.
inline int first_driver_of_cuda(int major) { return major >= 13 ? 580 : major == 12 ? 525 : 450; }

/// Why a driver does not run a program; empty if it does, or if there is no driver (0). Both are numbers as CUDA has
/// them, 13000 for 13.0: the newest CUDA that the driver knows, and the one that the program was built with. Within a
/// major release older drivers run newer programs.
inline std::string driver_refusal(int driver, int program) {
  if (driver == 0 || driver / 1000 >= program / 1000) return {};
  const int major = program / 1000;
  const auto name = [](int version) { return fmt::format("{}.{}", version / 1000, version % 1000 / 10); };
  return fmt::format(
      "the NVIDIA driver knows CUDA {} at most, and this build of the library is of CUDA {}: update the driver to {} "
      "or later, or put NVIDIA's package cuda-compat-{}-{} on the loader's path, or build the library with CUDA {}",
      name(driver), name(program), first_driver_of_cuda(major), major, program % 1000 / 10, driver / 1000);
}

}  // namespace deep_ep::cuda
