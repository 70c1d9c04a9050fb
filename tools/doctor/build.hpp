// What this program was built with, as far as machines differ in it.
#pragma once

#include <string>
#include <vector>

namespace deep_ep::tools {

struct BuiltFor {
  std::string cuda;                        ///< "12.9.86"; empty: without CUDA
  std::vector<std::string> architectures;  ///< in CMake's words: "90a-real", "100-real", "90-virtual"
};

/// This program.
BuiltFor built_for();

}  // namespace deep_ep::tools
